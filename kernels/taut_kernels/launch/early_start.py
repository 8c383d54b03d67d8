"""How many tokens start early: programmatic dependent launch of what stands between products.

Without torch: the launcher reads tile tables, too.
"""

EARLY_TOKENS = 64
"""Most tokens of a call between products that starts before the kernel in front of it has ended,
or lets the one behind it do so, on Hopper; 0: none does. With more, programs that wait take places
from those that work, or unevenly (README, "Early starts between products"). Read in every call but
where `tiles_fused.lookup` kept its answer, and by `tiles_scaled_mm.tables` once a process; W4A16
products start early whatever it is."""
