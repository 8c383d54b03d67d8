"""Taut's gateway: an OpenAI-compatible front door for vLLM workers that serve compressed models."""
