-- Append consecutive events to each of several requests.
-- KEYS: load hash, queues in class order (5), then (request hash, output stream) for each request, then the lease
-- ARGV: group, retention s, reader timeout ms, incarnation token,
--       then for each request: epoch, number of the first event, '1' if the last one is terminal, count, payloads
-- Reply for each request: {code, length of the log, edges, cancel reason or ''}
--   0 fenced   1 appended   2 all of it was there   4 gap: the log is shorter than it should be
local now = now_ms()
local replies, a = {}, 5
for i = 1, (#KEYS - 7) / 2 do
  local req, out = KEYS[5 + 2 * i], KEYS[6 + 2 * i]
  local first, count = tonumber(ARGV[a + 1]), tonumber(ARGV[a + 3])
  local m = redis.call('HMGET', req, 'epoch', 'state', 'q', 'edges', 'cancel', 'seen', 'grace', 'token')
  local have, last = redis.call('XLEN', out), first + count - 1
  -- The token too: a failover may forget an epoch, which is then given out a second time.
  if m[1] ~= ARGV[a] or m[8] ~= ARGV[4] then
    replies[i] = {0, have, '', ''}
  elseif have >= last then
    replies[i] = {2, have, m[4], m[5] or ''}
  elseif m[2] ~= 'running' then
    replies[i] = {0, have, '', ''}
  elseif have < first - 1 then
    replies[i] = {4, have, m[4], m[5] or ''}
  else
    for n = have + 1, last do
      redis.call('XADD', out, n .. '-0', 'd', ARGV[a + 4 + n - first])
    end
    if have == 0 then redis.call('EXPIRE', out, redis.call('TTL', req)) end
    local cancel = ''
    if ARGV[a + 2] == '1' then
      finish(req, out, KEYS[1], KEYS[1 + tonumber(m[3])], ARGV[1], ARGV[2], now)
    else
      cancel = wanted_end(req, {m[5], m[6], m[7]}, tonumber(ARGV[3]), now, KEYS[#KEYS]) or ''
    end
    replies[i] = {1, last, m[4], cancel}
  end
  a = a + 4 + count
end
return replies
