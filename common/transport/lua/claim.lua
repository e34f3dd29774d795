-- Read new entries from several queues in order, no more than asked for in all (COUNT of XREADGROUP is per stream); what
-- waits behind a stream is moved up as far as there is room for it.
-- KEYS: lease, streams in reading order, then backlog and turns of those that have them
-- ARGV: group, worker, token, count, then for each stream where its backlog is among those (from 1), or 0
-- Reply: {index of the queue (from 1), entry id, request id, ...}; nil when the lease is not held
-- Not repeatable: when the reply is lost, the entries are in the worker's history.
if redis.call('GET', KEYS[1]) ~= ARGV[3] then return false end
local room, found = tonumber(ARGV[4]), {}

local function read(stream, index)
  local reply = redis.call('XREADGROUP', 'GROUP', ARGV[1], ARGV[2], 'COUNT', room, 'STREAMS', stream, '>')
  for _, entry in ipairs(reply and reply[1][2] or {}) do
    found[#found + 1] = index
    found[#found + 1] = entry[1]
    found[#found + 1] = entry[2][2]
    room = room - 1
  end
end

local streams, backlogs = #ARGV - 4, {}
for k = streams + 2, #KEYS, 2 do backlogs[#backlogs + 1] = KEYS[k] end
local does_any_wait = #backlogs > 1000 or redis.call('EXISTS', unpack(backlogs)) > 0  -- there are limits to unpacking
for i = 1, streams do
  if room <= 0 then break end
  local stream, place = KEYS[1 + i], tonumber(ARGV[4 + i])
  read(stream, i)
  if does_any_wait and place > 0 then
    local backlog, turns = backlogs[place], KEYS[streams + 1 + 2 * place]
    if room > 0 and redis.call('EXISTS', backlog) == 1 then
      move_up(stream, backlog, turns, room)
      read(stream, i)
    end
    keep_one_unread(stream, backlog, turns, ARGV[1])
  end
end
return found
