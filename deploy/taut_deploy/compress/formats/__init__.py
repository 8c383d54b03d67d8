"""From codes to tensors and configuration on disk."""
