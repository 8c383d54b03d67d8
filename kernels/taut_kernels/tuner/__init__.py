"""Measuring, on the card at hand, whether our products or vLLM's are the faster ones for a model.

Nothing here runs while requests are served, and no op imports it.
"""
