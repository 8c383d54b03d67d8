"""Attention of whole sequences, forward and backward."""
