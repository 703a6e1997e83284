"""A stand-in for Transformer Engine, which needs a GPU to be built: the classes, names and records of 1.0 to
2.20.

It is not the library: a forward multiplies in the weight's own dtype and writes down what the real one would.
`install` puts it into ``sys.modules`` for one test; ``flavour`` is the module that holds the FP8 state
(``quantization`` from 2.9 on, ``fp8`` before).
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional


class Recipe:
    """Base of the recipes."""


def _recipe(name: str) -> type[Recipe]:
    return type(name, (Recipe,), {"__module__": "transformer_engine.common.recipe"})


DelayedScaling = _recipe("DelayedScaling")
Float8CurrentScaling = _recipe("Float8CurrentScaling")
Float8BlockScaling = _recipe("Float8BlockScaling")
MXFP8BlockScaling = _recipe("MXFP8BlockScaling")


class NVFP4BlockScaling(Recipe):
    """The two settings that want a GPU of compute capability 10.0 or 10.3; on by default (2.20)."""

    def __init__(self, disable_rht: bool = False, disable_stochastic_rounding: bool = False) -> None:
        self.disable_rht, self.disable_stochastic_rounding = disable_rht, disable_stochastic_rounding


NVFP4BlockScaling.__module__ = "transformer_engine.common.recipe"


class FP8GlobalStateManager:
    """Whether a forward runs under ``autocast(enabled=True)``, and with which recipe."""

    enabled = False
    recipe: Any = None

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        return cls.enabled

    @classmethod
    def get_fp8_recipe(cls) -> Any:
        return cls.recipe

    @classmethod
    def autocast_enter(
        cls,
        enabled: bool = False,
        calibrating: bool = False,
        fp8_recipe: Any = None,
        fp8_group: Any = None,
        _graph: bool = False,
    ) -> None:
        """What an autocast calls when it is opened, by these names; ``fp8_autocast_enter`` before 2.9."""
        cls.enabled, cls.recipe = enabled, fp8_recipe or DelayedScaling()

    @classmethod
    def autocast_exit(cls, enabled: bool, _graph: bool) -> None:
        """What it calls when it is closed; ``fp8_autocast_exit`` before 2.9."""


@contextmanager
def autocast(enabled: bool = True, recipe: Any = None, fp8_recipe: Any = None) -> Iterator[None]:
    """The context that the real one is called from; 1.x calls it ``fp8_autocast``, and its recipe so too."""
    recipe = recipe or fp8_recipe
    before = FP8GlobalStateManager.enabled, FP8GlobalStateManager.recipe
    manager = FP8GlobalStateManager
    enter = manager.autocast_enter if hasattr(manager, "autocast_enter") else manager.fp8_autocast_enter
    enter(enabled=enabled, calibrating=False, fp8_recipe=recipe, fp8_group=None, _graph=False)
    try:
        yield
    finally:
        FP8GlobalStateManager.enabled, FP8GlobalStateManager.recipe = before
        leave = manager.autocast_exit if hasattr(manager, "autocast_exit") else manager.fp8_autocast_exit
        leave(enabled, _graph=False)


class TransformerEngineBaseModule(nn.Module):
    """What every GEMM module has in common."""

    def __init__(self) -> None:
        super().__init__()
        self.name: str | None = None
        self.fp8 = False
        self.fp8_initialized = False
        self.fp8_calibration = False
        self.fp8_meta: dict[str, Any] = {"fp8_checkpoint": False, "fp8_group": None}
        self.primary_weights_in_fp8 = False
        self.forwarded_at_least_once = False

    def prepare_forward(self) -> None:
        """Write down how this forward runs, as the real ``init_fp8_metadata`` does."""
        self.forwarded_at_least_once = True
        self.fp8 = self.fp8_initialized = FP8GlobalStateManager.is_fp8_enabled()
        if self.fp8:
            self.fp8_meta["recipe"] = FP8GlobalStateManager.recipe


class Linear(TransformerEngineBaseModule):
    """``te.Linear``; without a bias the real one keeps an empty tensor, and so does this."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        parameters_split: tuple[str, ...] = (),
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight_names = [f"{name}weight" for name in parameters_split or ("",)]
        self.bias_names = [f"{name}bias" for name in parameters_split or ("",)]
        for name in parameters_split or ("",):
            rows = out_features // max(len(parameters_split), 1)
            self.register_parameter(
                f"{name}weight", nn.Parameter(torch.zeros(rows, in_features, device=device))
            )
            self.register_parameter(
                f"{name}bias", nn.Parameter(torch.zeros(rows if bias else 0, device=device))
            )

    def forward(self, x: torch.Tensor, is_first_microbatch: bool | None = None) -> torch.Tensor:
        self.prepare_forward()
        return functional.linear(x, torch.cat([getattr(self, name) for name in self.weight_names]))


class LayerNormLinear(Linear):
    """``te.LayerNormLinear``."""

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, parameters_split: tuple[str, ...] = ()
    ) -> None:
        super().__init__(in_features, out_features, bias, parameters_split=parameters_split)
        self.layer_norm_weight = nn.Parameter(torch.ones(in_features))
        self.layer_norm_bias = nn.Parameter(torch.zeros(in_features))


class LayerNormMLP(TransformerEngineBaseModule):
    """``te.LayerNormMLP`` with a gated activation: fc1 is twice as wide."""

    def __init__(self, hidden_size: int, ffn_hidden_size: int) -> None:
        super().__init__()
        self.layer_norm_weight = nn.Parameter(torch.ones(hidden_size))
        self.fc1_weight = nn.Parameter(torch.zeros(2 * ffn_hidden_size, hidden_size))
        self.fc1_bias = nn.Parameter(torch.zeros(2 * ffn_hidden_size))
        self.fc2_weight = nn.Parameter(torch.zeros(hidden_size, ffn_hidden_size))
        self.fc2_bias = nn.Parameter(torch.zeros(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.prepare_forward()
        first, second = functional.linear(x, self.fc1_weight, self.fc1_bias).chunk(2, dim=-1)
        return functional.linear(functional.silu(first) * second, self.fc2_weight)


class GroupedLinear(TransformerEngineBaseModule):
    """``te.GroupedLinear``: one weight per expert."""

    def __init__(self, num_gemms: int, in_features: int, out_features: int) -> None:
        super().__init__()
        self.num_gemms = num_gemms
        for i in range(num_gemms):
            self.register_parameter(f"weight{i}", nn.Parameter(torch.zeros(out_features, in_features)))

    def forward(self, x: torch.Tensor, m_splits: list[int]) -> torch.Tensor:
        self.prepare_forward()
        return torch.cat(
            [functional.linear(part, getattr(self, f"weight{i}")) for i, part in enumerate(x.split(m_splits))]
        )


class OperationGroupedLinear(nn.Module):
    """``te.ops.GroupedLinear``, an operation: it has no base class and no record of its forwards (2.20)."""

    def __init__(self, num_groups: int, in_features: int, out_features: int) -> None:
        super().__init__()
        for i in range(num_groups):
            self.register_parameter(f"weight{i}", nn.Parameter(torch.zeros(out_features, in_features)))


OperationGroupedLinear.__name__ = OperationGroupedLinear.__qualname__ = "GroupedLinear"

MODULES: dict[str, tuple[type, ...]] = {
    "transformer_engine.pytorch.module.base": (TransformerEngineBaseModule,),
    "transformer_engine.pytorch.module.linear": (Linear,),
    "transformer_engine.pytorch.module.layernorm_linear": (LayerNormLinear,),
    "transformer_engine.pytorch.module.layernorm_mlp": (LayerNormMLP,),
    "transformer_engine.pytorch.module.grouped_linear": (GroupedLinear,),
    "transformer_engine.pytorch.ops.basic.grouped_linear": (OperationGroupedLinear,),
    "transformer_engine.common.recipe": (
        DelayedScaling,
        Float8BlockScaling,
        Float8CurrentScaling,
        MXFP8BlockScaling,
        NVFP4BlockScaling,
    ),
}
for _name, _classes in MODULES.items():
    for _class in _classes:
        _class.__module__ = _name


def install(monkeypatch: pytest.MonkeyPatch, flavour: str = "quantization") -> ModuleType:
    """Put the stand-in where the library would be; returns ``transformer_engine.pytorch``."""
    state = f"transformer_engine.pytorch.{flavour}"
    for name in (
        "transformer_engine",
        "transformer_engine.common",
        "transformer_engine.pytorch",
        "transformer_engine.pytorch.module",
        state,
        *MODULES,
    ):
        module = ModuleType(name)
        module.__path__ = []
        for each in MODULES.get(name, ()):
            setattr(module, each.__name__, each)
        monkeypatch.setitem(sys.modules, name, module)
    library = sys.modules["transformer_engine.pytorch"]
    for each in (Linear, LayerNormLinear, LayerNormMLP, GroupedLinear):
        setattr(library, each.__name__, each)
    if flavour == "fp8":
        for name in ("autocast_enter", "autocast_exit"):
            method = vars(FP8GlobalStateManager)[name]
            monkeypatch.setattr(FP8GlobalStateManager, f"fp8_{name}", method, raising=False)
            monkeypatch.delattr(FP8GlobalStateManager, name)
    setattr(library, "autocast" if flavour == "quantization" else "fp8_autocast", autocast)
    sys.modules[state].FP8GlobalStateManager = FP8GlobalStateManager  # type: ignore[attr-defined]
    return library
