"""The two Lua scripts of the shared store: the arithmetic of ``bucket`` inside Redis.

A caller is one hash with the fields ``requests``, ``tokens`` and ``at``, so one script touches one
key and works on a cluster. The time is Redis's own: gateways whose clocks differ agree. A caller
that is left alone is forgotten after ``KEEP_S``, when its buckets are full whatever it owed.

Arguments of both: requests and tokens a minute, 0 where there is no limit.
"""

from __future__ import annotations

from taut_service.admit.limits.bucket import SLACK

KEEP_S = 180
_LOAD = """
local rpm, tpm = tonumber(ARGV[1]), tonumber(ARGV[2])
local clock = redis.call('TIME')
local now = clock[1] + clock[2] / 1000000
local state = redis.call('HMGET', KEYS[1], 'requests', 'tokens', 'at')
local idle = math.max(0, now - (tonumber(state[3]) or now))
local requests = math.min(rpm, (tonumber(state[1]) or rpm) + rpm * idle / 60)
local tokens = math.min(tpm, (tonumber(state[2]) or tpm) + tpm * idle / 60)
"""
_SAVE = f"""
redis.call('HSET', KEYS[1], 'requests', string.format('%.9f', requests),
  'tokens', string.format('%.9f', tokens), 'at', string.format('%.6f', now))
redis.call('EXPIRE', KEYS[1], {KEEP_S})
"""
TAKE = f"""
{_LOAD}
local need = tonumber(ARGV[3])
if (rpm > 0 and requests < 1 - {SLACK}) or (tpm > 0 and tokens < need - {SLACK}) then
  return {{0, tostring(requests), tostring(tokens)}}
end
if rpm > 0 then requests = requests - 1 end
if tpm > 0 then tokens = tokens - need end
{_SAVE}
return {{1, tostring(requests), tostring(tokens)}}
"""
"""Third argument: tokens needed. Answer: granted, requests left, tokens left. Writes if granted."""
SETTLE = f"""
{_LOAD}
requests = math.max(-rpm, math.min(rpm, requests + tonumber(ARGV[3])))
tokens = math.max(-tpm, math.min(tpm, tokens + tonumber(ARGV[4])))
{_SAVE}
return 1
"""
"""Third and fourth argument: requests and tokens to give back, negative to charge."""
