-- How many requests of one partition wait before a certain one.
-- KEYS: load hash, queues in class order (5)
-- ARGV: group, class of the queue that it stands in, id of its entry, most to count in that queue
-- Reply: {how many, measured drain in requests/s as text}
local class, ahead = tonumber(ARGV[2]), 0
for c = 1, class do
  local queue, pending, last = KEYS[1 + c], 0, '0-0'
  local groups = redis.pcall('XINFO', 'GROUPS', queue)
  for _, group in ipairs(groups.err and {} or groups) do
    local facts = {}
    for k = 1, #group, 2 do facts[group[k]] = group[k + 1] end
    if facts['name'] == ARGV[1] then pending, last = facts['pending'], facts['last-delivered-id'] end
  end
  if c < class then
    ahead = ahead + math.max(redis.call('XLEN', queue) - pending, 0)
  else
    ahead = ahead + #redis.call('XRANGE', queue, '(' .. last, '(' .. ARGV[3], 'COUNT', ARGV[4])
  end
end
return {ahead, string.format('%.4f', drain_rate(KEYS[1], now_ms()))}
