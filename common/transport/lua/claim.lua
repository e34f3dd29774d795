-- Read new entries from several queues in order, no more than asked for in all (COUNT of XREADGROUP is per stream).
-- KEYS: lease, queues in reading order
-- ARGV: group, worker, token, count
-- Reply: {index of the queue (from 1), entry id, request id, ...}; nil when the lease is not held
-- Not repeatable: when the reply is lost, the entries are in the worker's history.
if redis.call('GET', KEYS[1]) ~= ARGV[3] then return false end
local room, found = tonumber(ARGV[4]), {}
for i = 2, #KEYS do
  if room <= 0 then break end
  local reply = redis.call('XREADGROUP', 'GROUP', ARGV[1], ARGV[2], 'COUNT', room, 'STREAMS', KEYS[i], '>')
  if reply then
    for _, entry in ipairs(reply[1][2]) do
      found[#found + 1] = i - 1
      found[#found + 1] = entry[1]
      found[#found + 1] = entry[2][2]
      room = room - 1
    end
  end
end
return found
