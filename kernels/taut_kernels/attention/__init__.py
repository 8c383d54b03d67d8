"""Attention: prefill and training over whole or packed sequences."""
