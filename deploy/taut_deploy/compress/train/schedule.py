"""Learning rate and order of sequences: functions of the step alone, so that a run can resume."""

import math

import torch


def rate_at(step: int, steps: int, warmup: float, final_rate: float) -> float:
    """Share of the highest learning rate: a linear rise, then half a cosine.

    Args:
        step: from 0.
        steps: in all.
        warmup: share of the steps that rise.
        final_rate: share of the rate at the end.

    Returns:
        A factor in (0, 1].
    """
    rising = math.ceil(warmup * steps)
    if step < rising:
        return (step + 1) / (rising + 1)
    progress = (step - rising) / max(1, steps - rising)
    return final_rate + (1.0 - final_rate) * 0.5 * (1.0 + math.cos(math.pi * progress))


def rows_at(step: int, batch: int, count: int, seed: int) -> torch.Tensor:
    """Which sequences a step takes: each once, in another order every time round.

    Args:
        step: from 0.
        batch: sequences of a step.
        count: sequences there are.
        seed: of the orders.

    Returns:
        [batch] int64.
    """
    places = range(step * batch, (step + 1) * batch)
    orders = {place // count: None for place in places}
    drawn = {
        turn: torch.randperm(count, generator=torch.Generator().manual_seed(seed + 7919 * turn))
        for turn in orders
    }
    return torch.stack([drawn[place // count][place % count] for place in places])
