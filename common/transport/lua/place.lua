-- How many requests of one partition are claimed before a certain one.
-- KEYS: load hash, queues in class order (5), backlog and turns of the classes that have them (6)
-- ARGV: group, class that it is in, most to count in a stream, and
--       of one that stands in a stream: 'entry', the id of its entry
--       of one that waits in this partition: 'waiting', its name in the backlog
--       of one that waits in another partition: 'elsewhere', how many wait before it there (partitions take turns)
-- Reply: {how many, of these in the backlog of its class, measured drain in requests/s as text}
local group, class, most, kind, place = ARGV[1], tonumber(ARGV[2]), ARGV[3], ARGV[4], ARGV[5]
local ahead, rank = 0, 0
for c = 1, class do
  local stream, backlog = KEYS[1 + c], PLACES[c] and KEYS[6 + PLACES[c]]
  if c < class then
    ahead = ahead + #unread(stream, group, '+', most) + (backlog and redis.call('ZCARD', backlog) or 0)
  elseif kind == 'entry' then
    ahead = ahead + #unread(stream, group, '(' .. place, most)
  elseif kind == 'elsewhere' then
    ahead = ahead + #unread(stream, group, '+', most) + math.min(tonumber(place), redis.call('ZCARD', backlog))
  else
    rank = redis.call('ZRANK', backlog, place)
    if rank then ahead = ahead + #unread(stream, group, '+', most) + rank end  -- else it has entered the stream
  end
end
return {ahead, rank or 0, string.format('%.4f', drain_rate(KEYS[1], now_ms()))}
