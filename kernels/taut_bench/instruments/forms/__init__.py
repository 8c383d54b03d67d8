"""Calls that stand for what every op launches: small lists, which :mod:`.recorder` runs.

A list names shapes, types and tiles; what a kernel is compiled with follows from the launch.
"""
