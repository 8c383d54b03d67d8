"""Training a compressed student: quantisation-aware training and distillation, one trainer."""
