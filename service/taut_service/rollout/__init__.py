"""Moves a model's traffic to a candidate step by step, as the guard's evidence allows, or back."""
