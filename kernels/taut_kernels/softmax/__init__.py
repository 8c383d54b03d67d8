"""Softmax along rows, forward and backward."""
