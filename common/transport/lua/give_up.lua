-- End a request that nobody owns: it is queued, or the lease of its owner is gone.
-- KEYS: request hash, output stream, load hash, lease of the owner seen, queues in class order (5), backlog and turns of
--       the classes that have them (6)
-- ARGV: group, retention s, what the caller saw (state, epoch, length of the log, owner), then the payload that ends it
--       under epoch + 1, and the request id
-- Reply: {'over'}, {'owned'}, {'ended', number of the payload, edges},
--        {'changed'}: it is not as the caller saw it, look again
local req, out = KEYS[1], KEYS[2]
local m = redis.call('HMGET', req, 'state', 'epoch', 'owner', 'q', 'edges')
if not m[1] or m[1] == 'done' then return {'over'} end
local have = redis.call('XLEN', out)
if m[1] ~= ARGV[3] or m[2] ~= ARGV[4] or have ~= tonumber(ARGV[5]) or (m[3] or '') ~= ARGV[6] then return {'changed'} end
if m[1] == 'running' and redis.call('EXISTS', KEYS[4]) == 1 then return {'owned'} end
redis.call('XADD', out, (have + 1) .. '-0', 'd', ARGV[7])
if have == 0 then redis.call('EXPIRE', out, redis.call('TTL', req)) end
redis.call('HSET', req, 'epoch', tonumber(m[2]) + 1)  -- whoever held it is fenced
local class, group = tonumber(m[4]), ARGV[1]
local stream, k = KEYS[4 + class], PLACES[class]
if k then leave(req, ARGV[8], stream, KEYS[9 + k], KEYS[10 + k], group) end
finish(req, out, KEYS[3], stream, group, ARGV[2], now_ms())
if k then keep_one_unread(stream, KEYS[9 + k], KEYS[10 + k], group) end
return {'ended', have + 1, m[5]}
