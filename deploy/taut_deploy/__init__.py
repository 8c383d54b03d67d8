"""The pipeline of taut: model store, compression, validation, worker and the ``taut`` command."""
