-- A takeover from a worker that was only slow does not count against the request.
-- KEYS: request hash
-- ARGV: worker, epoch under which it held the request
-- Reply: 1 forgiven, 0 nobody took it over, it is gone, or this was said before
local m = redis.call('HMGET', KEYS[1], 'epoch', 'owner', 'attempts', 'strikes', 'forgiven')
if not m[1] or tonumber(m[1]) <= tonumber(ARGV[2]) or m[2] == ARGV[1] or m[5] == ARGV[2] then return 0 end
redis.call('HSET', KEYS[1], 'forgiven', ARGV[2])
if tonumber(m[3]) > 0 then redis.call('HINCRBY', KEYS[1], 'attempts', -1) end
if tonumber(m[4] or '0') > 0 then redis.call('HINCRBY', KEYS[1], 'strikes', -1) end
return 1
