"""Interpolative form of two factors: some outputs are computed, the others are sums of those.

Source: Cheng, Gimbutas, Martinsson, Rokhlin, "On the compression of low rank matrices", SIAM J.
Sci. Comput. 26 (2005), §3: rows of a matrix of rank r that a pivoted QR picks span all others with
coefficients of moderate size. One factor then holds an identity, which needs no storage: r (N + K)
numbers become r (N + K) - r², so that the same bytes hold a higher rank.
"""

import math

import scipy.linalg
import torch

from taut_deploy.compress.lowrank.whitened_svd import Factors


def interpolate(factors: Factors) -> Factors:
    """The same product with an identity in its first factor.

    Args:
        factors: up [N, r] of full column rank, down [r, K].

    Returns:
        up [N - r, r] and down [r, K], with the order of the outputs.
    """
    n, rank = factors.up.shape
    up, down = factors.up.double().cpu(), factors.down.double().cpu()
    picked = scipy.linalg.qr(up.T.numpy(), mode="r", pivoting=True)[1]
    pivots = torch.from_numpy(picked.astype("int64"))
    basis = up[pivots[:rank]]
    others: torch.Tensor = torch.linalg.solve(basis, up[pivots[rank:]], left=False)
    order = torch.empty(n, dtype=torch.int32)
    order[pivots] = torch.arange(n, dtype=torch.int32)
    device = factors.up.device
    return Factors(others.float().to(device), (basis @ down).float().to(device), order.to(device))


def interpolative_rank(n: int, k: int, numbers: float) -> int:
    """The largest rank whose factors hold at most so many numbers: r (N + K) - r².

    Args:
        n: output features.
        k: input features.
        numbers: below N·K.
    """
    half = (n + k) / 2
    return int(half - math.sqrt(half * half - numbers))
