"""`taut::weight_only_linear_cpu`: activations of 16 bits times weights of 4 or 8, on a CPU."""
