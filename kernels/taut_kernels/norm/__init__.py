"""RMSNorm and LayerNorm: with quantisation behind them to serve, with gradients to train."""
