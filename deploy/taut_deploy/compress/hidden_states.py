"""What enters each block, on disk: a text's states are written and read a batch at a time.

Three streams: ``calibration``, the text through the compressed blocks before; ``exact``, the same
text through the original ones, where a recipe asks for it; and the golden prompts. A stream that is
read is the file itself, mapped; the system takes its pages back when it needs them.
"""

from collections.abc import Iterable, Sequence

import torch

from taut_deploy.compress.workspace import Workspace
from taut_deploy.errors import CheckpointError

CALIBRATION, EXACT = "calibration", "exact"


class HiddenStates:
    """The streams of one run.

    Args:
        workspace: of the run.
    """

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace

    def save(self, index: int, stream: str, rows: int, batches: Iterable[torch.Tensor]) -> None:
        """Save what enters a block, or past the last one leaves it.

        Args:
            index: position of the block.
            stream: ``calibration`` or ``exact``.
            rows: sequences of the text.
            batches: [b, T, H] each, in order.
        """
        self._workspace.save_rows(_name(index, stream), rows, batches)

    def save_prompts(self, index: int, prompts: Sequence[torch.Tensor]) -> None:
        """Save the golden prompts' states, [1, T, H] each."""
        named = {f"probe-{number}": hidden for number, hidden in enumerate(prompts)}
        self._workspace.save_tensors(_name(index), named)

    def of(self, index: int, stream: str) -> torch.Tensor:
        """A text's states [B, T, H] on the CPU.

        Raises:
            CheckpointError: they are gone.
        """
        found = self._workspace.rows(_name(index, stream))
        if found is None:
            raise self._gone(index)
        return found

    def prompts(self, index: int) -> list[torch.Tensor]:
        """The golden prompts' states, [1, T, H] each, on the CPU.

        Raises:
            CheckpointError: they are gone.
        """
        found = self._workspace.tensors(_name(index))
        if found is None:
            raise self._gone(index)
        return [found[f"probe-{number}"] for number in range(len(found))]

    def drop(self, index: int) -> None:
        """Forget what entered a block that is done."""
        for name in (_name(index), _name(index, CALIBRATION), _name(index, EXACT)):
            self._workspace.drop_tensors(name)

    def _gone(self, index: int) -> CheckpointError:
        return CheckpointError(
            f"{self._workspace.directory}: the state before block {index} is gone; use --no-resume"
        )


def _name(index: int, stream: str = "prompts") -> str:
    return f"hidden-{index}-{stream}"
