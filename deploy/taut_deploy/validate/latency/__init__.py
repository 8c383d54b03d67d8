"""Latency of two servers side by side: plan, load, clock, statistics, report.

``plan`` says how much is asked, ``prompts`` with what, ``stream`` times one answer, ``measure``
interleaves the two models, ``ratios`` puts intervals on what came of it and ``section`` writes it
down. Nothing here loads torch.
"""
