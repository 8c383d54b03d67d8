"""Structured pruning to a plain Hugging Face configuration: fewer neurons, heads, channels, blocks.

Source: Minitron, arXiv:2407.14679, §2 (importance from activations); block influence: ShortGPT,
arXiv:2403.03853, §3.1.
"""
