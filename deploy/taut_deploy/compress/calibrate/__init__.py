"""Calibration: the tokens, and what one block sees of them."""
