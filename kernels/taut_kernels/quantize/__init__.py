"""Quantisation of rows alone."""
