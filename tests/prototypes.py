"""torchao's prototype training, which releases before 0.17 spell otherwise or lack: a test that needs it is
skipped there."""

from typing import Any

import pytest
import torch
from torchao.quantization import quantize_

FOLDER = "torchao.prototype.moe_training"


def module(name: str) -> Any:
    """One of its modules; skips the test where there is none."""
    return pytest.importorskip(
        f"{FOLDER}.{name}", reason="this torchao has no such prototype", exc_type=ImportError
    )


def mxfp8(recipe: str = "MXFP8_RCEIL") -> Any:
    """The configuration of an MXFP8 recipe for ``quantize_``."""
    config = module("config")
    made = config.MXFP8TrainingOpConfig.from_recipe(config.MXFP8TrainingRecipe[recipe])
    try:
        quantize_(torch.nn.Linear(32, 32, dtype=torch.bfloat16), made)
    except AssertionError as error:
        if "install the latest torch" not in str(error):
            raise
        pytest.skip(
            "this torch lacks what torchao's MXFP8 training asks of it: "
            "torch.distributed.tensor._ops.scaled_mm_single_dim_strategy"
        )
    return made


def float8(**settings: Any) -> Any:
    """The configuration of FP8 by the weight, for experts too."""
    kind = module("config").Float8TrainingOpConfig
    if missing := settings.keys() - kind.__dataclass_fields__.keys():
        pytest.skip(f"Float8TrainingOpConfig of this torchao has no {', '.join(missing)}")
    return kind(**settings)
