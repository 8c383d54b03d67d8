"""Orthogonal matrices that spread every direction over all others: randomised Hadamard matrices.

A Hadamard matrix of order ``n`` exists for many ``n``: products (Sylvester) of orders 2 and of
Paley's two constructions for a prime ``q``: order ``q + 1`` where ``q = 3 mod 4``, order
``2 (q + 1)`` where ``q = 1 mod 4``. 576 is 16 x 36 that way, 896 is 32 x 28. Where none is found a
random orthogonal matrix serves as well; only its product is dearer, and nobody multiplies by it at
run time.

Source: Paley, "On orthogonal matrices", J. Math. Phys. 12 (1933); the random signs: QuIP#,
arXiv:2402.04396, §3.
"""

import torch


def random_rotation(size: int, seed: int) -> torch.Tensor:
    """An orthogonal matrix, equal for equal arguments.

    Args:
        size: its order.
        seed: chooses the signs, or the whole matrix where no Hadamard matrix is known here.

    Returns:
        [size, size] fp64 with ``R Rᵀ = 1``.
    """
    generator = torch.Generator().manual_seed(seed)
    hadamard = hadamard_matrix(size)
    if hadamard is None:
        square = torch.randn(size, size, generator=generator, dtype=torch.float64)
        q, r = torch.linalg.qr(square)
        random: torch.Tensor = q * r.diagonal().sign()
        return random
    signs = torch.randint(0, 2, (size,), generator=generator).double() * 2 - 1
    scaled: torch.Tensor = signs[:, None] * hadamard / size**0.5
    return scaled


def hadamard_matrix(size: int) -> torch.Tensor | None:
    """A matrix of ``±1`` with orthogonal rows, [size, size] fp64, or None if none is known here."""
    doublings = 0
    rest = size
    while rest >= 1:
        base = _smallest(rest)
        if base is not None:
            two = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
            for _ in range(doublings):
                base = torch.kron(two, base)
            return base
        if rest % 2:
            return None
        rest, doublings = rest // 2, doublings + 1
    return None


def _smallest(order: int) -> torch.Tensor | None:
    """A matrix of this very order: 1, or one of Paley's."""
    if order == 1:
        return torch.ones(1, 1, dtype=torch.float64)
    if _is_prime(order - 1) and order % 4 == 0:
        core = _jacobsthal(order - 1)
        return _bordered(core, -1.0) + torch.eye(order, dtype=torch.float64)
    q = order // 2 - 1
    if order % 4 == 0 and _is_prime(q) and q % 4 == 1:
        symmetric = _bordered(_jacobsthal(q), 1.0)
        off = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
        on = torch.tensor([[1.0, -1.0], [-1.0, -1.0]], dtype=torch.float64)
        return torch.kron(symmetric, off) + torch.kron(torch.eye(q + 1, dtype=torch.float64), on)
    return None


def _bordered(core: torch.Tensor, left: float) -> torch.Tensor:
    """A row of ones above and a column of ``left`` beside the core; 0 in the corner."""
    order = len(core) + 1
    bordered = torch.zeros(order, order, dtype=torch.float64)
    bordered[0, 1:] = 1.0
    bordered[1:, 0] = left
    bordered[1:, 1:] = core
    return bordered


def _jacobsthal(q: int) -> torch.Tensor:
    """Entry ``i, j``: 1 where ``i - j`` is a square modulo the prime q, -1 where not, 0 at 0."""
    squares = {(x * x) % q for x in range(1, q)}
    symbol = torch.tensor(
        [0.0] + [1.0 if x in squares else -1.0 for x in range(1, q)], dtype=torch.float64
    )
    index = torch.arange(q)
    return symbol[(index[:, None] - index[None, :]) % q]


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % d for d in range(2, int(number**0.5) + 1))
