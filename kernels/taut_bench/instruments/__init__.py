"""Instruments that show why a kernel, a callable or a model is slow or large.

- :mod:`.subject`: what an instrument looks at
- :mod:`.op_cases`, :mod:`.op_work`: our ops by
  name, with inputs, and their bytes and FLOPs by formula
- :mod:`.counters`: bytes and FLOPs of anything, counted as it runs
- :mod:`.ceilings`, :mod:`.roofline`: measured
  limits of the machine, and how near a subject comes
- :mod:`.profile`, :mod:`.findings`: a profiler
  trace, and what it says in words
- :mod:`.memory`: what holds the memory at the peak
- :mod:`.explain`: what ``torch.compile`` makes of a callable
- :mod:`.cuda_graph`: capture with its constraints checked

Importing the package does nothing.
"""
