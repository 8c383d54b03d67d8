"""Layer formats: a grid, how inputs are rounded, and the tensors and configuration on disk."""
