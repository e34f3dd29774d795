-- Append consecutive events to each of several requests, and push them to the edges that read these.
-- KEYS: load hash, queues in class order (5), then (request hash, output stream) for each request, then the lease
-- ARGV: group, retention s, reader timeout ms, incarnation token, what the name of an edge's channel begins with (''
--       where the caller pushes), length of what stands before the request id in the name of a request hash,
--       then for each request: epoch, number of the first event, '1' if the last one is terminal, count, payloads
-- Reply for each request: {code, length of the log, edges, cancel reason or ''}
--   0 fenced   1 appended   2 all of it was there   4 gap: the log is shorter than it should be
-- Pushed is what is in the log now, again after a repetition: it may not have been pushed.
local now = now_ms()
local channel, head = ARGV[5], tonumber(ARGV[6])
local replies, frames, a = {}, {}, 7

-- In MessagePack: an array of frames, each an array of request id, number and payload.
local function big_endian(marker, format, number) return string.char(marker) .. struct.pack(format, number) end
local function keep(edges, req, first, last)
  local waiting = frames[edges]
  if not waiting then
    waiting = {}
    frames[edges] = waiting
  end
  local rid = string.sub(req, head + 1)
  local begin = string.char(0x93, 0xd9, #rid) .. rid
  for n = first, last do
    local payload = ARGV[a + 4 + n - first]
    local size = #payload
    local bin
    if size < 256 then bin = string.char(0xc4, size)
    else bin = big_endian(0xc6, '>I4', size) end
    waiting[#waiting + 1] = begin .. cmsgpack.pack(n) .. bin .. payload
  end
end
local function push()
  for edges, waiting in pairs(frames) do
    local count = #waiting
    local begin = count < 16 and string.char(0x90 + count) or big_endian(0xdd, '>I4', count)
    local message = begin .. table.concat(waiting)
    for edge in string.gmatch(edges, '[^,]+') do redis.pcall('PUBLISH', channel .. edge, message) end
  end
end

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
  if channel ~= '' and m[4] and m[4] ~= '' and (replies[i][1] == 1 or replies[i][1] == 2) then
    keep(m[4], req, first, last)
  end
  a = a + 4 + count
end
push()
return replies
