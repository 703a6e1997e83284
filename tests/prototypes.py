"""torchao's prototype training, which releases before 0.17 spell otherwise or lack: a test that needs it is skipped there."""

from __future__ import annotations

from typing import Any

import pytest

FOLDER = "torchao.prototype.moe_training"


def module(name: str) -> Any:
    """One of its modules; skips the test where there is none."""
    return pytest.importorskip(f"{FOLDER}.{name}", reason="this torchao has no such prototype", exc_type=ImportError)


def mxfp8(recipe: str = "MXFP8_RCEIL") -> Any:
    """The configuration of an MXFP8 recipe for ``quantize_``."""
    config = module("config")
    return config.MXFP8TrainingOpConfig.from_recipe(config.MXFP8TrainingRecipe[recipe])


def float8(**settings: Any) -> Any:
    """The configuration of FP8 by the weight, for experts too."""
    return module("config").Float8TrainingOpConfig(**settings)
