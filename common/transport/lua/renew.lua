-- Hold, extend or give up a lease.
-- KEYS: lease
-- ARGV: token, milliseconds (0 gives it up)
-- Reply: 1 done, 2 done anew (there was none), 0 it is another incarnation's
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return 0 end
if ARGV[2] == '0' then
  redis.call('DEL', KEYS[1])
elseif holder then
  redis.call('PEXPIRE', KEYS[1], ARGV[2])  -- unlike SET it is let through by a server that is full
else
  redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
  return 2
end
return 1
