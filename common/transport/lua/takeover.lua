-- Move pending entries of a dead worker to this one.
-- KEYS: queue, lease of the dead, lease of the taker
-- ARGV: group, dead, taker, token, count
-- Reply: {entry id, request id, ...}; nil when the taker's lease is not held. Ownership is taken by own.lua.
if redis.call('GET', KEYS[3]) ~= ARGV[4] then return false end
if redis.call('EXISTS', KEYS[2]) == 1 then return {} end
local pending = redis.call('XPENDING', KEYS[1], ARGV[1], '-', '+', ARGV[5], ARGV[2])
if #pending == 0 then
  redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], ARGV[2])
  return {}
end
local taken = {}
for _, entry in ipairs(pending) do
  -- An entry that was deleted meanwhile is dropped from the pending list and not returned.
  local claimed = redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[3], 0, entry[1])
  if claimed[1] then
    taken[#taken + 1] = claimed[1][1]
    taken[#taken + 1] = claimed[1][2][2]
  end
end
return taken
