"""Device code that several kernels of sm_90 share: copies, barriers, products, order of tiles."""
