"""Searches for tiles and what keeps the tables: run from a checkout, not part of the wheel.

``PYTHONPATH=kernels python -m tuning.<name> --help``; an editable install needs no path.
"""
