"""Compression: one file of pure tensor maths per method, and a driver that streams decoder blocks."""
