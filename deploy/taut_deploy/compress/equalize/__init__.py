"""Transforms that keep the function and make it easier to round."""
