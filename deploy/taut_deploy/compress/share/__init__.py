"""Weights that share values: codebooks; pure tensor maths."""
