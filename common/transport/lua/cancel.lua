-- End a queued request, or ask the owner of a running one to end it.
-- KEYS: request hash, output stream, load hash, inbox of the owner seen, queues in class order (5), backlog and turns of
--       the classes that have them (6)
-- ARGV: group, retention s, reason, by, request id, and what the caller saw: state, epoch, length of the log, owner;
--       then the inbox entry, then the payloads that end a queued request under epoch + 1
-- Reply: {'unknown'}, {'over'}, {'asked'}, {'ended', number of the first payload, edges},
--        {'changed'}: it is not as the caller saw it, look again
local req, out = KEYS[1], KEYS[2]
local m = redis.call('HMGET', req, 'state', 'epoch', 'owner', 'q', 'edges')
if not m[1] then return {'unknown'} end
if m[1] == 'done' then return {'over'} end
local have = redis.call('XLEN', out)
if m[1] ~= ARGV[6] or m[2] ~= ARGV[7] or (m[3] or '') ~= ARGV[9] then return {'changed'} end
if m[1] == 'running' then
  if redis.call('HSETNX', req, 'cancel', ARGV[3]) == 1 then
    redis.call('HSET', req, 'cancel_by', ARGV[4])
    redis.call('XADD', KEYS[4], 'MAXLEN', '~', 1000, '*', 'd', ARGV[10])
    redis.call('EXPIRE', KEYS[4], 3600)
  end
  return {'asked'}
end
if have ~= tonumber(ARGV[8]) then return {'changed'} end
for k = 11, #ARGV do redis.call('XADD', out, (have + k - 10) .. '-0', 'd', ARGV[k]) end
redis.call('HSET', req, 'epoch', tonumber(m[2]) + 1, 'cancel', ARGV[3], 'cancel_by', ARGV[4])
local class, group = tonumber(m[4]), ARGV[1]
local stream, k = KEYS[4 + class], PLACES[class]
if k then leave(req, ARGV[5], stream, KEYS[9 + k], KEYS[10 + k], group) end
finish(req, out, KEYS[3], stream, group, ARGV[2], now_ms())
if k then keep_one_unread(stream, KEYS[9 + k], KEYS[10 + k], group) end
return {'ended', have + 1, m[5]}
