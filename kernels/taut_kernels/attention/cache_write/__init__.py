"""Rotated keys and values written to a paged cache."""
