-- Say that requests still have readers, or (with an edge) that this edge stops reading them.
-- KEYS: request hashes
-- ARGV: edge that leaves, or ''
-- Reply: how many of the requests exist
local t = redis.call('TIME')
local now, found = t[1] * 1000 + math.floor(t[2] / 1000), 0
for i = 1, #KEYS do
  local edges = redis.call('HGET', KEYS[i], 'edges')
  if edges then
    found = found + 1
    if ARGV[1] == '' then
      redis.call('HSET', KEYS[i], 'seen', now)
    else
      local kept = {}
      for edge in string.gmatch(edges, '[^,]+') do
        if edge ~= ARGV[1] then kept[#kept + 1] = edge end
      end
      redis.call('HSET', KEYS[i], 'edges', table.concat(kept, ','))
    end
  end
end
return found
