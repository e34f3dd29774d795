-- Shared by the scripts that count requests. Prepended by scripts.py.
-- Numbers of the request hash: state queued|running|done; q = queue class (index into the list of queues); qid = the
-- queue entry; cost = admitted tokens, counted under cls (the class of admission, which a handover does not change).
-- Load hash: requests:<cls> and tokens:<cls> admitted and unfinished; for each tenant with unfinished requests
-- tn:<tenant> (how many) and tt:<tenant> (their tokens); rate, win, win_n (the measured drain).

local function now_ms()
  local t = redis.call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end

-- One more request has ended: count it in the current window of at least five seconds, and blend full windows.
local function measure_drain(load, now)
  local d = redis.call('HMGET', load, 'win', 'win_n', 'rate')
  local start, n = tonumber(d[1] or now), tonumber(d[2] or '0') + 1
  if now - start > 60000 then start, n = now, 1 end
  if now - start >= 5000 then
    local rate = n * 1000 / (now - start)
    if d[3] then rate = (rate + tonumber(d[3])) / 2 end
    redis.call('HSET', load, 'rate', string.format('%.4f', rate), 'win', now, 'win_n', 0)
  else
    redis.call('HSET', load, 'win', start, 'win_n', n)
  end
end

-- Finished requests a second, as measured; before the first full window, as far as that one goes.
local function drain_rate(load, now)
  local d = redis.call('HMGET', load, 'rate', 'win', 'win_n')
  if d[1] then return tonumber(d[1]) end
  if d[2] and now > tonumber(d[2]) then return tonumber(d[3]) * 1000 / (now - tonumber(d[2])) end
  return 0
end

-- Forgets all that is counted as admitted, but not the measured drain.
local function forget_admitted(load)
  local names = {'rate', 'win', 'win_n'}
  local kept = redis.call('HMGET', load, unpack(names))
  redis.call('DEL', load)
  for k, name in ipairs(names) do
    if kept[k] then redis.call('HSET', load, name, kept[k]) end
  end
end

-- A tenant has one more (sign 1) or one fewer (sign -1) unfinished request.
local function count_tenant(load, tenant, cost, sign)
  local n = redis.call('HINCRBY', load, 'tn:' .. tenant, sign)
  redis.call('HINCRBY', load, 'tt:' .. tenant, sign * cost)
  if n <= 0 then redis.call('HDEL', load, 'tn:' .. tenant, 'tt:' .. tenant) end
end

-- Marks the request as done, takes it off its queue and starts the retention of its log.
local function finish(req, out, load, queue, group, retention_s, now)
  local m = redis.call('HMGET', req, 'qid', 'cls', 'cost', 'tenant')
  redis.call('HSET', req, 'state', 'done', 'ended', now)
  redis.call('XACK', queue, group, m[1])
  redis.call('XDEL', queue, m[1])
  redis.call('HINCRBY', load, 'requests:' .. m[2], -1)
  redis.call('HINCRBY', load, 'tokens:' .. m[2], -tonumber(m[3]))
  count_tenant(load, m[4] or '', tonumber(m[3]), -1)
  measure_drain(load, now)
  redis.call('EXPIRE', req, retention_s)
  redis.call('EXPIRE', out, retention_s)
end

-- Reason why somebody wants the end of the request, or false. Without a sign of a reader for longer than the grace
-- time and the time that edges have to give such a sign, the request is marked as orphaned here.
-- Where the lease of the worker that asks is gone, nobody is judged: the clock has leapt, and readers seem silent for as
-- long (the worker gives them time when it has its lease again).
-- m = HMGET cancel, seen, grace
local function wanted_end(req, m, reader_timeout_ms, now, lease)
  if m[1] then return m[1] end
  local grace = tonumber(m[3])
  if grace < 0 or now - tonumber(m[2]) <= grace + reader_timeout_ms then return false end
  if redis.call('EXISTS', lease) == 0 then return false end
  redis.call('HSET', req, 'cancel', 'orphaned', 'cancel_by', 'log')
  return 'orphaned'
end
