-- How long the logs of requests are.
-- KEYS: (request hash, output stream) for each request
-- Reply: for each request the length of its log, -1 when the request is gone
local lengths = {}
for i = 1, #KEYS, 2 do
  lengths[#lengths + 1] = redis.call('EXISTS', KEYS[i]) == 1 and redis.call('XLEN', KEYS[i + 1]) or -1
end
return lengths
