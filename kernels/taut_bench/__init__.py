"""Measured against rivals, correctness first: one module an op, run as ``python -m``.

Protocol (``timing.py``): a CUDA graph holds many calls over at least 256 MB of rotated weights, L2
is flushed before every replay, subjects take turns, and a figure is the median with its p20 and
p80.
"""
