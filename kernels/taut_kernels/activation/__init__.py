"""SiLU·mul and SwiGLU: with quantisation behind them to serve, with gradients to train."""
