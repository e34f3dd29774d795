-- Register an edge for a request's frames and read from a position.
-- KEYS: request hash, output stream
-- ARGV: edge or '', last event it has, count, most edges to remember
-- Reply: nil when the request is gone; else {state, spec, grace ms, length, entries}
local m = redis.call('HMGET', KEYS[1], 'state', 'spec', 'grace', 'edges')
if not m[1] then return false end
if ARGV[1] ~= '' and m[1] ~= 'done' then
  -- Most recent first; an edge that falls off the end still finds its events by reading.
  local edges, kept = {ARGV[1]}, tonumber(ARGV[4])
  for edge in string.gmatch(m[4], '[^,]+') do
    if edge ~= ARGV[1] and #edges < kept then edges[#edges + 1] = edge end
  end
  local t = redis.call('TIME')
  redis.call('HSET', KEYS[1], 'edges', table.concat(edges, ','), 'seen', t[1] * 1000 + math.floor(t[2] / 1000))
end
local from = string.format('%d-0', tonumber(ARGV[2]) + 1)
return {m[1], m[2], m[3], redis.call('XLEN', KEYS[2]), redis.call('XRANGE', KEYS[2], from, '+', 'COUNT', ARGV[3])}
