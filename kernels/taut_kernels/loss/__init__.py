"""Losses of training and distillation, one op a file, forward and backward.

- :mod:`taut_kernels.loss.cross_entropy`: over logits that exist
- :mod:`taut_kernels.loss.linear_cross_entropy`: with the projection that makes the logits
- :mod:`taut_kernels.loss.linear_kl`, :mod:`taut_kernels.loss.linear_jsd`: student and teacher
- :mod:`taut_kernels.loss.modules`: the same as `torch.nn.Module`
"""
