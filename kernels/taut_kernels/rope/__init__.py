"""Rotary position embeddings, to serve and to train."""
