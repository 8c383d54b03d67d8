"""Instruments that show why a kernel, a callable or a model is slow or large.

- :mod:`~taut_kernels.instruments.subject`: what an instrument looks at
- :mod:`~taut_kernels.instruments.op_cases`, :mod:`~taut_kernels.instruments.op_work`: our ops by
  name, with inputs, and their bytes and FLOPs by formula
- :mod:`~taut_kernels.instruments.counters`: bytes and FLOPs of anything, counted as it runs
- :mod:`~taut_kernels.instruments.ceilings`, :mod:`~taut_kernels.instruments.roofline`: measured
  limits of the machine, and how near a subject comes
- :mod:`~taut_kernels.instruments.profile`, :mod:`~taut_kernels.instruments.findings`: a profiler
  trace, and what it says in words
- :mod:`~taut_kernels.instruments.memory`: what holds the memory at the peak
- :mod:`~taut_kernels.instruments.explain`: what ``torch.compile`` makes of a callable
- :mod:`~taut_kernels.instruments.cuda_graph`: capture with its constraints checked

Importing the package does nothing.
"""
