"""A half-installed Transformer Engine: like the real one, it imports although its torch part does not."""

import contextlib
import importlib

with contextlib.suppress(ImportError):
    importlib.import_module("transformer_engine.pytorch")
