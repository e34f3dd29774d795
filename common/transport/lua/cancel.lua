-- End a queued request, or ask the owner of a running one to end it.
-- KEYS: request hash, output stream, load hash, inbox of the owner seen, queues in class order (5)
-- ARGV: group, retention s, reason, by, and what the caller saw: state, epoch, length of the log, owner;
--       then the inbox entry, then the payloads that end a queued request under epoch + 1
-- Reply: {'unknown'}, {'over'}, {'asked'}, {'ended', number of the first payload, edges},
--        {'changed'}: it is not as the caller saw it, look again
local req, out = KEYS[1], KEYS[2]
local m = redis.call('HMGET', req, 'state', 'epoch', 'owner', 'q', 'edges')
if not m[1] then return {'unknown'} end
if m[1] == 'done' then return {'over'} end
local have = redis.call('XLEN', out)
if m[1] ~= ARGV[5] or m[2] ~= ARGV[6] or (m[3] or '') ~= ARGV[8] then return {'changed'} end
if m[1] == 'running' then
  if redis.call('HSETNX', req, 'cancel', ARGV[3]) == 1 then
    redis.call('HSET', req, 'cancel_by', ARGV[4])
    redis.call('XADD', KEYS[4], 'MAXLEN', '~', 1000, '*', 'd', ARGV[9])
    redis.call('EXPIRE', KEYS[4], 3600)
  end
  return {'asked'}
end
if have ~= tonumber(ARGV[7]) then return {'changed'} end
for k = 10, #ARGV do redis.call('XADD', out, (have + k - 9) .. '-0', 'd', ARGV[k]) end
redis.call('HSET', req, 'epoch', tonumber(m[2]) + 1, 'cancel', ARGV[3], 'cancel_by', ARGV[4])
finish(req, out, KEYS[3], KEYS[4 + tonumber(m[4])], ARGV[1], ARGV[2], now_ms())
return {'ended', have + 1, m[5]}
