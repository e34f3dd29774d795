-- Accept a request once.
-- KEYS: request hash, load hash, queues in class order
-- ARGV: request id, class, spec, fingerprint, nonce, edge, grace ms, deadline ms or '', cost in tokens,
--       max requests, max tokens, ttl s, model
-- Reply: {'ok'}, {'dup', state}, {'conflict'} or {'full', depth, rate in requests/s as text}
-- A repetition of the same call carries the same nonce and is answered 'ok' again.
local req, load = KEYS[1], KEYS[2]
local class = tonumber(ARGV[2])
local had = redis.call('HMGET', req, 'state', 'fp', 'nonce')
if had[1] then
  if had[3] == ARGV[5] then return {'ok'} end
  if had[2] ~= ARGV[4] then return {'conflict'} end
  return {'dup', had[1]}
end

-- What is queued and running in this class and above; a backlog of a lower class does not count.
local depth, tokens, all = 0, 0, 0
for c = 1, #KEYS - 2 do
  local len = redis.call('XLEN', KEYS[c + 2])
  all = all + len
  if c <= class then
    depth = depth + len
    tokens = tokens + tonumber(redis.call('HGET', load, 'tokens:' .. c) or '0')
  end
end
-- Nothing is admitted, so whatever the counters say was lost or doubled by a failover.
if all == 0 then tokens = 0 end
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
-- A single request larger than the token limit is admitted when nothing else is: it would never fit otherwise.
if depth >= tonumber(ARGV[10]) or (depth > 0 and tokens + tonumber(ARGV[9]) > tonumber(ARGV[11])) then
  local d = redis.call('HMGET', load, 'rate', 'win', 'win_n')
  local rate = d[1] or '0'
  if not d[1] and d[2] and now > tonumber(d[2]) then
    rate = string.format('%.4f', tonumber(d[3]) * 1000 / (now - tonumber(d[2])))
  end
  return {'full', depth, rate}
end

-- The first write decides whether a full server lets the script through, so it must be one that takes memory.
local qid = redis.call('XADD', KEYS[class + 2], '*', 'rid', ARGV[1])
redis.call('HSET', req, 'state', 'queued', 'epoch', '0', 'attempts', '0', 'model', ARGV[13], 'spec', ARGV[3],
  'fp', ARGV[4], 'nonce', ARGV[5], 'q', class, 'qid', qid, 'cls', class, 'cost', ARGV[9], 'edges', ARGV[6],
  'grace', ARGV[7], 'deadline', ARGV[8], 'submitted', now, 'seen', now)
redis.call('EXPIRE', req, ARGV[12])
if all == 0 then
  for c = 1, #KEYS - 2 do redis.call('HDEL', load, 'tokens:' .. c) end
end
redis.call('HINCRBY', load, 'tokens:' .. class, ARGV[9])
return {'ok'}
