"""Compression: one file of pure tensor maths a method, and a driver that streams blocks."""
