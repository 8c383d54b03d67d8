"""What lm-evaluation-harness 0.4.13 asked and returned for one task, in the place of itself.

``harness_samples.json`` has the samples of a real run with the tiny models of the tests; here they
are asked again, as its evaluator does, of the model that it is given. The real one takes seconds to
import: ``tests/e2e/test_validate_quick.py`` runs it.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

RECORDED = json.loads(Path(__file__).with_name("harness_samples.json").read_text())
ROLES = ("baseline", "candidate")


class LM:
    """``lm_eval.api.model.LM``: what its constructor leaves there."""

    def __init__(self) -> None:
        self._rank, self._world_size = 0, 1
        self.cache_hook: Any = None
        self.task_dict: dict[str, Any] = {}


class TaskManager:
    """``lm_eval.tasks.TaskManager``."""

    def __init__(self, include_path: str | None = None) -> None:
        self.include_path = include_path


class Harness:
    """Stands for the modules that are imported; ``runs`` has what each run was given.

    Args:
        samples: of the baseline's run and the candidate's.
    """

    def __init__(self, samples: dict[str, list[dict[str, Any]]]) -> None:
        self.samples = samples
        self.runs: list[dict[str, Any]] = []

    def modules(self) -> dict[str, ModuleType]:
        """By name, for ``sys.modules``."""
        found = {
            name: ModuleType(name)
            for name in ("lm_eval", "lm_eval.api", "lm_eval.api.model", "lm_eval.tasks")
        }
        evaluator = found["lm_eval.evaluator"] = ModuleType("lm_eval.evaluator")
        found["lm_eval.api.model"].LM = LM  # type: ignore[attr-defined]
        found["lm_eval.tasks"].TaskManager = TaskManager  # type: ignore[attr-defined]
        evaluator.simple_evaluate = self.simple_evaluate  # type: ignore[attr-defined]
        return found

    def simple_evaluate(self, model: Any, **given: Any) -> dict[str, Any]:
        """Ask the recorded requests, all choices of an item one after the other."""
        (name,) = given["tasks"]
        if name != RECORDED["task"]:
            raise KeyError(name)
        rows = copy.deepcopy(self.samples[ROLES[len(self.runs) % 2]][: given["limit"]])
        self.runs.append(given)
        asked = [SimpleNamespace(args=tuple(pair)) for row in rows for pair in row["arguments"]]
        told = iter(model.loglikelihood(asked))
        for row in rows:
            heard = [next(told) for _ in row["arguments"]]
            row["resps"], row["filtered_resps"] = [[each] for each in heard], heard
            logs = [log for log, _ in heard]
            row["acc"] = float(logs.index(max(logs)) == row["target"])
        return {"samples": {name: rows}, "lm_eval_version": RECORDED["lm_eval"]}
