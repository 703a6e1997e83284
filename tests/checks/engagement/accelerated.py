"""The real `Accelerator.prepare` over a stand-in for Transformer Engine, whose real layers need a GPU."""

import sys
from typing import Any

import pytest
import torch
from torch import nn

from tests.stand_ins import transformer_engine as stand_in


class Linear(stand_in.Linear):
    """``te.Linear`` as Accelerate builds it, with ``params_dtype``."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        params_dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(in_features, out_features, bias)
        self.to(params_dtype)


class LayerNorm(nn.LayerNorm):
    """``te.LayerNorm``, likewise."""

    def __init__(self, normalized_shape: int, eps: float, params_dtype: torch.dtype) -> None:
        super().__init__(normalized_shape, eps, dtype=params_dtype)


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a Transformer Engine that Accelerate converts to where the library would be."""
    library = stand_in.install(monkeypatch, "fp8")
    monkeypatch.setattr(library, "Linear", Linear)
    monkeypatch.setattr(library, "LayerNorm", LayerNorm, raising=False)
    monkeypatch.setattr(
        sys.modules["transformer_engine.pytorch.fp8"],
        "check_mxfp8_support",
        lambda: (False, ""),
        raising=False,
    )
    for module in (
        "accelerate.accelerator",
        "accelerate.utils.transformer_engine",
        "accelerate.utils.imports",
        "accelerate.utils.dataclasses",
        "accelerate.state",
    ):
        monkeypatch.setattr(f"{module}.is_transformer_engine_available", lambda: True, raising=False)


def prepare(
    monkeypatch: pytest.MonkeyPatch, model: nn.Module, optimizer: torch.optim.Optimizer, **settings: Any
) -> Any:
    """Model and optimizer as ``accelerate launch`` with the Transformer Engine backend leaves them."""
    from accelerate import Accelerator
    from accelerate.utils import TERecipeKwargs

    install(monkeypatch)
    accelerator = Accelerator(mixed_precision="fp8", cpu=True, kwargs_handlers=[TERecipeKwargs()], **settings)
    return accelerator.prepare(model, optimizer)
