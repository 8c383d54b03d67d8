"""What is installed here, which kernel serves each layer of a model, and why."""
