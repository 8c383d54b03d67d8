"""``taut compress`` as one of optimum's quantizers.

Which models it takes is decided by the pipeline, by structure; optimum's tables of architectures
are not asked.
"""

from pathlib import Path
from typing import Any

from optimum.exporters.tasks import TasksManager
from optimum.quantization_base import OptimumQuantizer

from taut_deploy.checkpoint import Manifest, verify
from taut_deploy.compress import pipeline
from taut_deploy.compress.job import CompressionJob
from taut_deploy.errors import OutputError
from taut_deploy.files import checked_output
from taut_deploy.home import TautHome
from taut_deploy.models import ModelRecord, ModelStore
from taut_deploy.optimum.configuration import TautConfig

_TASK = "text-generation"


class TautQuantizer(OptimumQuantizer):  # type: ignore[misc]  # optimum has no types
    """Compresses one model by recipes.

    Args:
        model: on disk.
    """

    def __init__(self, model: ModelRecord) -> None:
        self.model = model

    @classmethod
    def from_pretrained(
        cls, model_or_path: str | Path, file_name: str | None = None
    ) -> "TautQuantizer":
        """The quantizer of a model name, hub id, directory or ``.gguf`` file.

        Args:
            model_or_path: the model.
            file_name: optimum's name of one weight file; a model has its weights where it has them.

        Raises:
            ModelError: there is no such model.
            OutputError: a file name is given.
        """
        _require_none("file_name", file_name)
        return cls(ModelStore(TautHome.from_environment().models).fetch(str(model_or_path)))

    def quantize(
        self,
        save_dir: str | Path,
        file_prefix: str | None = None,
        *,
        config: TautConfig,
        device: str = "cpu",
        resume: bool = True,
        **kwargs: Any,
    ) -> Manifest:
        """Compress the model into a checkpoint; a finished identical one is returned as it is.

        Args:
            save_dir: checkpoint directory to make.
            file_prefix: optimum's prefix of weight files; a checkpoint's files have fixed names.
            config: the recipe.
            device: ``cpu`` or ``cuda``.
            resume: continue what an interrupted run left.
            kwargs: none is known.

        Raises:
            TautError: the recipe does not fit the model, or the output cannot be made.
        """
        _require_none("file_prefix", file_prefix)
        for name, value in kwargs.items():
            _require_none(name, value)
        job = CompressionJob(
            self.model,
            config.to_recipe(),
            checked_output(Path(save_dir)),
            TautHome.from_environment().root,
            device,
            resume,
        )
        return pipeline.compress(job)

    @staticmethod
    def load(checkpoint: str | Path) -> Any:
        """A checkpoint, verified, as the model that optimum's table names for the task.

        Raises:
            CheckpointError: it is none, or altered.
        """
        directory = Path(checkpoint)
        verify(directory)
        loader = TasksManager.get_model_class_for_task(_TASK, framework="pt")
        return loader.from_pretrained(directory, local_files_only=True, trust_remote_code=False)


def _require_none(name: str, value: Any) -> None:
    if value is not None:
        raise OutputError(f"{name}: taut has no such setting; leave it out")
