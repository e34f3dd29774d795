-- Turn pending queue entries of a worker into ownership.
-- KEYS: lease, load hash, dead letters, queues in class order (5), backlog and turns of the classes that have them (6),
--       then (request hash, output stream) for each entry
-- ARGV: group, worker, token, max attempts, retention s, reader timeout ms,
--       then for each entry: class, entry id, request id, epoch the worker holds or ''
-- Reply: nil when the lease is not held; else for each entry
--   {0}                          forget it: not this worker's, ended, or a leftover
--   {2}                          carry on: the epoch held is the current one
--   {3, n, payload, edges}       ended here with event n
--   {1, epoch, length, spec, cancel or '', attempts, ms since submission, strikes}
-- Attempts count the takeovers from dead workers. Strikes count those in a row at which the dead worker had brought the
-- request no further: whatever runs beside a request that kills its workers is not given up for it.
-- Read by whoever blocked on the streams: others that block shall find the next.
if redis.call('EXISTS', KEYS[9], KEYS[11], KEYS[13]) > 0 then
  for c, k in pairs(PLACES) do keep_one_unread(KEYS[3 + c], KEYS[8 + k], KEYS[9 + k], ARGV[1]) end
end
if redis.call('GET', KEYS[1]) ~= ARGV[3] then return false end
local group, worker, token = ARGV[1], ARGV[2], ARGV[3]
local load, dead_letters = KEYS[2], KEYS[3]
local now = now_ms()

local function fail(req, out, queue, epoch, code, message, edges)
  local n = redis.call('XLEN', out) + 1
  local payload = cmsgpack.pack({type = 'failed', epoch = epoch, t = now / 1000, code = code, message = message})
  redis.call('XADD', out, n .. '-0', 'd', payload)
  redis.call('HSET', req, 'epoch', epoch)  -- whoever held it is fenced
  finish(req, out, load, queue, group, ARGV[5], now)
  return {3, n, payload, edges}
end

-- What a dead worker's log of the request says of its guilt: the strikes after one more takeover.
local function judged(out, strikes)
  local last = redis.call('XREVRANGE', out, '+', '-', 'COUNT', 1)[1]
  local event = last and cmsgpack.unpack(last[2][2]) or {}
  if event.type == 'tokens' or event.type == 'choice' or event.type == 'prompt' then return 0 end
  if event.type == 'milestone' and event.what == 'held_back' then return strikes end
  return strikes + 1
end

local replies = {}
for i = 1, (#KEYS - 14) / 2 do
  local a = 7 + 4 * (i - 1)
  local class, qid, rid, known = ARGV[a], ARGV[a + 1], ARGV[a + 2], ARGV[a + 3]
  local queue, req, out = KEYS[3 + tonumber(class)], KEYS[13 + 2 * i], KEYS[14 + 2 * i]
  local mine = redis.call('XPENDING', queue, group, qid, qid, 1, worker)
  local m = redis.call('HMGET', req, 'state', 'epoch', 'q', 'qid', 'attempts', 'owner', 'token', 'deadline', 'cancel',
    'seen', 'grace', 'spec', 'submitted', 'edges', 'strikes')
  if #mine == 0 then
    replies[i] = {0}
  elseif not m[1] or m[1] == 'done' or m[3] ~= class or (m[4] ~= qid and m[4] ~= WAITING) then
    redis.call('XACK', queue, group, qid)
    redis.call('XDEL', queue, qid)
    local left = 0  -- what a lost request was counted for is forgotten with the last entry
    for c = 1, 5 do left = left + redis.call('XLEN', KEYS[3 + c]) end  -- nothing waits behind an empty stream
    if left == 0 then forget_admitted(load) end
    replies[i] = {0}
  elseif known == m[2] and m[6] == worker and m[7] == token then
    replies[i] = {2}
  else
    if m[4] == WAITING then redis.call('HSET', req, 'qid', qid) end
    local epoch, attempts, strikes = tonumber(m[2]) + 1, tonumber(m[5]), tonumber(m[15] or '0')
    -- Running elsewhere until now: its owner died. Running here: only our reply was lost.
    if m[1] == 'running' and (m[6] ~= worker or m[7] ~= token) then
      attempts, strikes = attempts + 1, judged(out, strikes)
      redis.call('HSET', req, 'attempts', attempts, 'strikes', strikes)
    end
    -- One that always gets a little further before it kills is stopped in the end, too.
    if strikes > tonumber(ARGV[4]) or attempts > 10 * tonumber(ARGV[4]) then
      redis.call('XADD', dead_letters, 'MAXLEN', '~', 1000, '*', 'rid', rid, 'reason', 'quarantined',
        'attempts', attempts, 'owner', m[6] or '', 'spec', m[12])
      replies[i] = fail(req, out, queue, epoch, 'quarantined',
        'the request was taken from a dead worker ' .. attempts .. ' times', m[14])
    elseif m[8] ~= '' and now > tonumber(m[8]) then
      replies[i] = fail(req, out, queue, epoch, 'deadline_exceeded',
        'the deadline passed before a worker could run the request', m[14])
    else
      local cancel = wanted_end(req, {m[9], m[10], m[11]}, tonumber(ARGV[6]), now, KEYS[1])
      redis.call('HSET', req, 'state', 'running', 'epoch', epoch, 'owner', worker, 'token', token)
      replies[i] = {1, epoch, redis.call('XLEN', out), m[12], cancel or '', attempts, now - tonumber(m[13]),
        strikes}
    end
  end
end
return replies
