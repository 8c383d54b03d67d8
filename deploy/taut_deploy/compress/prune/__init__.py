"""Masks: which weights are kept, and what the kept ones should become; pure tensor maths."""
