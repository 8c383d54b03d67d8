"""Losses of training and distillation, one op a file, forward and backward.

- :mod:`.cross_entropy`: over logits that exist
- :mod:`.linear_cross_entropy`: with the projection that makes the logits
- :mod:`.linear_kl`, :mod:`.linear_jsd`: student and teacher
- :mod:`.softmax`: along rows, by the same ring
- :mod:`.modules`: the same as `torch.nn.Module`
"""
