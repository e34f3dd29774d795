-- Accept a request once.
-- KEYS: request hash, load hash, queues in class order (5), load hashes of the other partitions (for a tenant's limits,
--       where one server holds them all)
-- ARGV: request id, class, spec, fingerprint, nonce, edge, grace ms, deadline ms or '', cost in tokens,
--       max requests, max tokens, ttl s, model, tenant, max requests and max tokens of the tenant (0: none)
-- Reply: {'ok'}, {'dup', state}, {'conflict'} or
--   {'full', reason, depth, rate in requests/s as text}; reason: requests, tokens, tenant_requests, tenant_tokens
-- A repetition of the same call carries the same nonce and is answered 'ok' again.
local QUEUES, UNDERSERVED, NORMAL = 5, 3, 4
local req, load = KEYS[1], KEYS[2]
local class, cost, tenant = tonumber(ARGV[2]), tonumber(ARGV[9]), ARGV[14]
local had = redis.call('HMGET', req, 'state', 'fp', 'nonce')
if had[1] then
  if had[3] == ARGV[5] then return {'ok'} end
  if had[2] ~= ARGV[4] then return {'conflict'} end
  return {'dup', had[1]}
end

-- What is queued and running in this class and above; a backlog of a lower class does not count.
local depth, tokens, all, all_tokens = 0, 0, 0, 0
for c = 1, QUEUES do
  local len = redis.call('XLEN', KEYS[c + 2])
  local counted = tonumber(redis.call('HGET', load, 'tokens:' .. c) or '0')
  all, all_tokens = all + len, all_tokens + counted
  if c <= class then depth, tokens = depth + len, tokens + counted end
end
local function of_tenant(hash)
  local m = redis.call('HMGET', hash, 'tn:' .. tenant, 'tt:' .. tenant)
  return tonumber(m[1] or '0'), tonumber(m[2] or '0')
end
local mine, my_tokens = of_tenant(load)
local active = tonumber(redis.call('HGET', load, 'tenants') or '0') + (mine == 0 and 1 or 0)
-- Nothing is admitted, so whatever the counters say was lost or doubled by a failover.
if all == 0 then tokens, all_tokens, mine, my_tokens, active = 0, 0, 0, 0, 1 end
local now = now_ms()

-- A single request larger than a token limit is admitted when nothing else is: it would never fit otherwise.
local function over(requests, held, max_requests, max_tokens)
  if requests >= max_requests then return 'requests' end
  if requests > 0 and held + cost > max_tokens then return 'tokens' end
end
local reason = over(depth, tokens, tonumber(ARGV[10]), tonumber(ARGV[11]))
if reason then return {'full', reason, depth, string.format('%.4f', drain_rate(load, now))} end
if ARGV[15] ~= '0' or ARGV[16] ~= '0' then
  local requests, held, rate = mine, my_tokens, drain_rate(load, now)
  for k = QUEUES + 3, #KEYS do
    local n, t = of_tenant(KEYS[k])
    requests, held, rate = requests + n, held + t, rate + drain_rate(KEYS[k], now)
  end
  local function bound(text) return text == '0' and math.huge or tonumber(text) end
  reason = over(requests, held, bound(ARGV[15]), bound(ARGV[16]))
  if reason then return {'full', 'tenant_' .. reason, requests, string.format('%.4f', rate)} end
end

-- A tenant that holds less than its equal share of the admitted tokens does not wait behind those that hold more.
local place = class
if class == NORMAL and active > 1 and my_tokens * active < all_tokens then place = UNDERSERVED end

-- The first write decides whether a full server lets the script through, so it must be one that takes memory.
local qid = redis.call('XADD', KEYS[place + 2], '*', 'rid', ARGV[1])
redis.call('HSET', req, 'state', 'queued', 'epoch', '0', 'attempts', '0', 'model', ARGV[13], 'spec', ARGV[3],
  'fp', ARGV[4], 'nonce', ARGV[5], 'q', place, 'qid', qid, 'cls', class, 'cost', cost, 'tenant', tenant,
  'edges', ARGV[6], 'grace', ARGV[7], 'deadline', ARGV[8], 'submitted', now, 'seen', now)
redis.call('EXPIRE', req, ARGV[12])
if all == 0 then
  local d = redis.call('HMGET', load, 'rate', 'win', 'win_n')
  redis.call('DEL', load)
  for k, name in ipairs({'rate', 'win', 'win_n'}) do
    if d[k] then redis.call('HSET', load, name, d[k]) end
  end
end
redis.call('HINCRBY', load, 'tokens:' .. class, cost)
count_tenant(load, tenant, cost, 1)
return {'ok'}
