-- Accept a request once.
-- KEYS: request hash, load hash, queues in class order (5), load hashes of the other partitions (where one server holds
--       them all)
-- ARGV: request id, class, spec, fingerprint, nonce, edge, grace ms, deadline ms or '', cost in tokens,
--       max requests, max tokens, ttl s, model, tenant, max requests and max tokens of the tenant (0: none),
--       what partitions out of reach hold: requests, tokens, the tenant's requests and tokens, rate in requests/s
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
  local n, t = tonumber(m[1] or '0'), tonumber(m[2] or '0')
  tenant_depth, tenant_tokens = tenant_depth + n, tenant_tokens + t
  for k = 3, #fields, 2 do
    depth, tokens = depth + tonumber(m[k] or '0'), tokens + tonumber(m[k + 1] or '0')
  end
  return n, t
end
local mine, my_tokens = 0, 0
if all > 0 then mine, my_tokens = count(load) end
for k = QUEUES + 3, #KEYS do count(KEYS[k]) end
local now = now_ms()
local function rate()
  local sum = tonumber(ARGV[21]) + drain_rate(load, now)
  for k = QUEUES + 3, #KEYS do sum = sum + drain_rate(KEYS[k], now) end
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

-- A tenant that holds less than its equal share of what this partition has admitted does not wait behind those that hold
-- more.
local place = class
local here = all == 0 and {} or redis.call('HMGET', load, 'tenants', 'tokens:2', 'tokens:4', 'tokens:5')
local active = tonumber(here[1] or '0') + (mine == 0 and 1 or 0)
local all_tokens = tonumber(here[2] or '0') + tonumber(here[3] or '0') + tonumber(here[4] or '0')
if class == NORMAL and active > 1 and my_tokens * active < all_tokens then place = UNDERSERVED end

-- The first write decides whether a full server lets the script through, so it must be one that takes memory.
local qid = redis.call('XADD', KEYS[place + 2], '*', 'rid', ARGV[1])
redis.call('HSET', req, 'state', 'queued', 'epoch', '0', 'attempts', '0', 'model', ARGV[13], 'spec', ARGV[3],
  'fp', ARGV[4], 'nonce', ARGV[5], 'q', place, 'qid', qid, 'cls', class, 'cost', cost, 'tenant', tenant,
  'edges', ARGV[6], 'grace', ARGV[7], 'deadline', ARGV[8], 'submitted', now, 'seen', now)
redis.call('EXPIRE', req, ARGV[12])
if all == 0 then forget_admitted(load) end
redis.call('HINCRBY', load, 'requests:' .. class, 1)
redis.call('HINCRBY', load, 'tokens:' .. class, cost)
count_tenant(load, tenant, cost, 1)
return {'ok'}
