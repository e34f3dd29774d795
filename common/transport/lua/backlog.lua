-- Shared by the scripts that touch what waits. Put before them by scripts.py.
-- A class of a model has a stream, which workers read, and behind it a backlog: a sorted set of
-- '<arrival in us>:<request id>' by start tag. Tags are virtual time, in tokens by weight (start-time fair queueing): a
-- request starts where its tenant's former one ends, but not before the virtual time, which is the start tag of what
-- entered the stream last.
-- turns: a sorted set of 't:<tenant>' with the end of its last request, as far as that is later than the virtual time;
-- and 'now' with the virtual time. Kept from the first request that waits until nothing is left, or for ten minutes.
-- What all scripts keep: while something waits, the stream holds something that nobody has read. A worker that blocks on
-- the streams never sleeps beside a backlog.
local MOST_TENANTS, FORGET_TURNS_S = 4096, 600
local WAITING = '0-0'  -- as the queue entry of a request that has none yet: it waits, or whoever reads its entry notes it
local PLACES = {[2] = 1, [4] = 3, [5] = 5}  -- where a class has its backlog and turns in a list of all of them

-- What no worker of the group has read: the id of the last entry that was.
local function last_read(stream, group)
  local groups = redis.pcall('XINFO', 'GROUPS', stream)
  for _, fields in ipairs(groups.err and {} or groups) do
    local name, last
    for k = 1, #fields, 2 do
      if fields[k] == 'name' then name = fields[k + 1] end
      if fields[k] == 'last-delivered-id' then last = fields[k + 1] end
    end
    if name == group then return last end
  end
  return '0-0'
end

local function unread(stream, group, before, most)
  return redis.call('XRANGE', stream, '(' .. last_read(stream, group), before, 'COUNT', most)
end

-- The virtual time is not before `to` any more. Who has had no more than that has no lead over a newcomer.
local function advance(turns, to)
  redis.call('ZREMRANGEBYSCORE', turns, '-inf', to)
  redis.call('ZADD', turns, 'GT', to, 'now')
  redis.call('EXPIRE', turns, FORGET_TURNS_S)
end

-- Start tag for one more request of a tenant. `share` is its cost by the tenant's weight, `held` that of what the tenant
-- has unfinished: as long as nothing has waited, nobody keeps turns, and that is what it has had.
local function take_turn(backlog, turns, tenant, share, held)
  local known = redis.call('ZMSCORE', turns, 'now', 't:' .. tenant)
  -- Forgotten (a failover, a standstill): what waits says how late it is.
  local now = known[1] or redis.call('ZRANGE', backlog, 0, 0, 'WITHSCORES')[2] or '0'
  local start = math.max(tonumber(now), known[2] and tonumber(known[2]) or held)
  redis.call('ZADD', turns, now, 'now', string.format('%.17g', start + share), 't:' .. tenant)
  redis.call('EXPIRE', turns, FORGET_TURNS_S)
  if redis.call('ZCARD', turns) > MOST_TENANTS then
    advance(turns, redis.call('ZRANGE', turns, MOST_TENANTS / 2, MOST_TENANTS / 2, 'WITHSCORES')[2])
  end
  return string.format('%.17g', start)
end

-- The first of those that wait enter the stream, no more than so many.
local function move_up(stream, backlog, turns, count)
  local first = redis.call('ZPOPMIN', backlog, count)
  for k = 1, #first, 2 do
    redis.call('XADD', stream, '*', 'rid', string.match(first[k], ':(.+)'))
  end
  if first[1] then advance(turns, first[#first]) end
end

local function keep_one_unread(stream, backlog, turns, group)
  if redis.call('EXISTS', backlog) == 1 and #unread(stream, group, '+', 1) == 0 then
    move_up(stream, backlog, turns, 1)
  end
end

-- A request that ends before anybody owned it: if it waits it leaves the backlog, and its tenant is not charged. For a class
-- with a backlog; `finish` does the rest.
local function leave(req, rid, stream, backlog, turns, group)
  local m = redis.call('HMGET', req, 'qid', 'wait', 'share', 'tenant')
  if m[1] ~= WAITING then return end
  if redis.call('ZREM', backlog, m[2]) == 1 then
    local tenant = 't:' .. m[4]
    if redis.call('ZSCORE', turns, tenant) then redis.call('ZINCRBY', turns, '-' .. m[3], tenant) end
    return
  end
  -- It has entered the stream. Where it was read already, `own` drops it.
  for _, entry in ipairs(unread(stream, group, '+', 10)) do
    if entry[2][2] == rid then redis.call('XDEL', stream, entry[1]) end
  end
end
