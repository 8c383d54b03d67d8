"""The model on disk: its tensors, its blocks one at a time, and whether they are sound."""
