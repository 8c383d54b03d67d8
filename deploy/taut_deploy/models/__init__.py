"""The model store: named sources, hub ids, local directories and GGUF files behind one door."""

from taut_deploy.models.store import ModelRecord, ModelStore

__all__ = ["ModelRecord", "ModelStore"]
