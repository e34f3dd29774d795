-- Move pending entries of a dead worker to this one, queue by queue, no more than asked for in all.
-- KEYS: lease of the dead, lease of the taker, queues of the partition in order
-- ARGV: group, dead, taker, token, count
-- Reply: {index of the queue (from 1), entry id, request id, ...}; nil when the taker's lease is not held. Ownership is
-- taken by own.lua.
if redis.call('GET', KEYS[2]) ~= ARGV[4] then return false end
if redis.call('EXISTS', KEYS[1]) == 1 then return {} end
local room, taken = tonumber(ARGV[5]), {}
for i = 3, #KEYS do
  if room <= 0 then break end
  local pending = redis.call('XPENDING', KEYS[i], ARGV[1], '-', '+', room, ARGV[2])
  if #pending == 0 then
    redis.call('XGROUP', 'DELCONSUMER', KEYS[i], ARGV[1], ARGV[2])
  end
  for _, entry in ipairs(pending) do
    -- An entry that was deleted meanwhile is dropped from the pending list and not returned.
    local claimed = redis.call('XCLAIM', KEYS[i], ARGV[1], ARGV[3], 0, entry[1])
    if claimed[1] then
      taken[#taken + 1] = i - 2
      taken[#taken + 1] = claimed[1][1]
      taken[#taken + 1] = claimed[1][2][2]
      room = room - 1
    end
  end
end
return taken
