-- Hand a running request back: it goes to the first class, which workers read before all others.
-- KEYS: request hash, queues in class order
-- ARGV: group, worker, epoch, request id
-- Reply: 1 released, 0 not this worker's (any more, as after a repetition)
local m = redis.call('HMGET', KEYS[1], 'state', 'epoch', 'owner', 'q', 'qid')
if m[1] ~= 'running' or m[2] ~= ARGV[3] or m[3] ~= ARGV[2] then return 0 end
local queue = KEYS[1 + tonumber(m[4])]
redis.call('XACK', queue, ARGV[1], m[5])
redis.call('XDEL', queue, m[5])
local qid = redis.call('XADD', KEYS[2], '*', 'rid', ARGV[4])
redis.call('HSET', KEYS[1], 'state', 'queued', 'epoch', tonumber(m[2]) + 1, 'q', 1, 'qid', qid)
redis.call('HDEL', KEYS[1], 'owner', 'token')
return 1
