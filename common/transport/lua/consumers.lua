-- Who is known to the groups.
-- KEYS: queues
-- ARGV: group
-- Reply: for each queue {name, ...}
local found = {}
for i, queue in ipairs(KEYS) do
  local names = {}
  for _, consumer in ipairs(redis.call('XINFO', 'CONSUMERS', queue, ARGV[1])) do
    for k = 1, #consumer, 2 do
      if consumer[k] == 'name' then names[#names + 1] = consumer[k + 1] end
    end
  end
  found[i] = names
end
return found
