-- Accept a request once.
-- KEYS: request hash, load hash, queues in class order (5), backlog and turns of the class, load hashes of the other
--       partitions (where one server holds them all)
-- ARGV: request id, class, spec, fingerprint, nonce, edge, grace ms, deadline ms or '', cost in tokens,
--       max requests, max tokens, ttl s, model, tenant, max requests and max tokens of the tenant (0: none),
--       what partitions out of reach hold: requests, tokens, the tenant's requests and tokens, rate in requests/s,
--       group, weight of the tenant
-- Reply: {'ok'}, {'dup', state}, {'conflict'} or
--   {'full', reason, depth, rate in requests/s as text}; reason: requests, tokens, tenant_requests, tenant_tokens
-- A repetition of the same call carries the same nonce and is answered 'ok' again.
local QUEUES, OTHERS = 5, 10
local req, load = KEYS[1], KEYS[2]
local class, cost, tenant = tonumber(ARGV[2]), tonumber(ARGV[9]), ARGV[14]
local stream, backlog, turns = KEYS[class + 2], KEYS[8], KEYS[9]
local had = redis.call('HMGET', req, 'state', 'fp', 'nonce')
if had[1] then
  if had[3] == ARGV[5] then return {'ok'} end
  if had[2] ~= ARGV[4] then return {'conflict'} end
  return {'dup', had[1]}
end

-- Nothing is queued here, so whatever the counters say was lost or doubled by a failover.
local all = 0
for c = 1, QUEUES do all = all + redis.call('XLEN', KEYS[c + 2]) end

-- What is queued and running in this class and above, over all partitions; a backlog of a lower class does not count.
local fields = {'tn:' .. tenant, 'tt:' .. tenant}
for _, c in ipairs({2, 4, 5}) do
  if c <= class then
    fields[#fields + 1] = 'requests:' .. c
    fields[#fields + 1] = 'tokens:' .. c
  end
end
local depth, tokens = tonumber(ARGV[17]), tonumber(ARGV[18])
local tenant_depth, tenant_tokens = tonumber(ARGV[19]), tonumber(ARGV[20])
local function count(hash)
  local m = redis.call('HMGET', hash, unpack(fields))
  local held = tonumber(m[2] or '0')
  tenant_depth, tenant_tokens = tenant_depth + tonumber(m[1] or '0'), tenant_tokens + held
  for k = 3, #fields, 2 do
    depth, tokens = depth + tonumber(m[k] or '0'), tokens + tonumber(m[k + 1] or '0')
  end
  return held
end
local held = all > 0 and count(load) or 0  -- by the tenant, here
for k = OTHERS, #KEYS do count(KEYS[k]) end
local now = now_ms()
local function rate()
  local sum = tonumber(ARGV[21]) + drain_rate(load, now)
  for k = OTHERS, #KEYS do sum = sum + drain_rate(KEYS[k], now) end
  return string.format('%.4f', sum)
end

-- A single request larger than a token limit is admitted when nothing else is: it would never fit otherwise.
local function over(requests, held, max_requests, max_tokens)
  if requests >= max_requests then return 'requests' end
  if requests > 0 and held + cost > max_tokens then return 'tokens' end
end
local reason = over(depth, tokens, tonumber(ARGV[10]), tonumber(ARGV[11]))
if reason then return {'full', reason, depth, rate()} end
if ARGV[15] ~= '0' or ARGV[16] ~= '0' then
  local function bound(text) return text == '0' and math.huge or tonumber(text) end
  reason = over(tenant_depth, tenant_tokens, bound(ARGV[15]), bound(ARGV[16]))
  if reason then return {'full', 'tenant_' .. reason, tenant_depth, rate()} end
end

-- What nobody has to wait for enters the stream, where a worker that has nothing to do finds it at once.
-- The first write decides whether a full server lets the script through, so it must be one that takes memory.
local weight = tonumber(ARGV[23])
local share = cost / weight
local qid = WAITING
if all > 0 and (redis.call('EXISTS', backlog) == 1 or #unread(stream, ARGV[22], '+', 1) > 0) then
  local t = redis.call('TIME')
  local name = string.format('%d%06d:', t[1], t[2]) .. ARGV[1]  -- of equals, who came first is first
  redis.call('ZADD', backlog, take_turn(backlog, turns, tenant, share, held / weight), name)
  redis.call('HSET', req, 'wait', name, 'share', string.format('%.17g', share))
else
  qid = redis.call('XADD', stream, '*', 'rid', ARGV[1])
  if all == 0 then
    redis.call('DEL', turns)
  elseif redis.call('EXISTS', turns) == 1 then
    advance(turns, take_turn(backlog, turns, tenant, share, held / weight))
  end
end
redis.call('HSET', req, 'state', 'queued', 'epoch', '0', 'attempts', '0', 'model', ARGV[13], 'spec', ARGV[3],
  'fp', ARGV[4], 'nonce', ARGV[5], 'q', class, 'qid', qid, 'cls', class, 'cost', cost, 'tenant', tenant,
  'edges', ARGV[6], 'grace', ARGV[7], 'deadline', ARGV[8], 'submitted', now, 'seen', now)
redis.call('EXPIRE', req, ARGV[12])
if all == 0 then forget_admitted(load) end
redis.call('HINCRBY', load, 'requests:' .. class, 1)
redis.call('HINCRBY', load, 'tokens:' .. class, cost)
count_tenant(load, tenant, cost, 1)
return {'ok'}
