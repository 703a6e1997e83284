"""Recognize FP8 layers: one module per FP8 implementation (stack), which `STACKS` lists.

A stack never imports its library. It has

- ``recognise(module, gaps)``: the module's own layers, empty if unknown. ``gaps`` takes what cannot be read.
- ``bf16_counterpart(module)``, if its layers train: the same work in 16 bits over the same weights,
  in a new module or the changed one. Raises `NoCounterpart`.
- perhaps ``scaling(module)``; ``casts(module)``, of its operands.
"""

from __future__ import annotations

import functools
import importlib
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from fp8doctor.facts import Scaling, Use
from fp8doctor.facts.scrub import scrub

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

_log = logging.getLogger("fp8doctor")


@dataclass(frozen=True)
class Layer:
    """One linear layer of a module; a fused MLP has two."""

    kind: str
    """Qualified name of the recognized class, perhaps an ancestor of the user's."""
    stack: str
    use: Use
    in_features: int
    out_features: int
    weights: tuple[Tensor, ...]
    dtype: str
    bias: bool = False
    part: str = ""
    """Suffix of the module's name, such as ``fc1``; empty if the module is the layer."""
    gemms: int = 1
    recipe: str | None = None
    features: dict[str, bool | int | str | None] = field(default_factory=dict)
    engaged: bool | None = None
    """``NOT_RECORDED``, with a gap, if the library keeps its record elsewhere."""
    weight_class: str | None = None
    role: Literal["body", "router", "experts"] = "body"


@dataclass(frozen=True)
class Cast:
    """How a layer casts one of its tensors to FP8."""

    dtype: str
    rows: Literal["tensor", "row"] = "tensor"
    """A scale for the whole tensor, or for each row of its last side."""
    scale: Tensor | None = None
    """The scale in use (number of the tensor * scale = FP8 number); None if the tensor's own magnitude gives
    it."""
    history: Tensor | None = None
    """Largest magnitudes of earlier steps that the scale comes from, or None."""
    power_of_2: bool = False
    """The scale is rounded down to a power of two."""


class NoCounterpart(Exception):
    """A layer has no BF16 form over its own weights; the message says why."""


STACKS = ("transformer_engine", "torchao", "known_classes", "plain")
"""The stacks in the order of asking: the first that knows a module describes it."""


@functools.cache
def stacks() -> tuple[Any, ...]:
    return tuple(importlib.import_module(f"{__name__}.{name}") for name in STACKS)


def recognise(module: Module, gaps: dict[str, str]) -> tuple[Layer, ...]:
    """Describe this module's own linear layers; none if a stack cannot read it."""
    for stack in stacks():
        try:
            layers: tuple[Layer, ...] = stack.recognise(module, gaps)
        except Exception as error:  # one odd layer must not cost the others
            _log.debug("a layer was left out", exc_info=True)
            gaps["network.linears"] = scrub(
                f"{type(module).__qualname__} was left out: {type(error).__name__}: {error}"
            )
            return ()
        if layers:
            return layers
    return ()


def is_fp8(module: Module) -> bool:
    """Tell if a module has a layer of its own that is set up for FP8 training."""
    return any(layer.use == "training" for layer in recognise(module, {}))


def bf16_counterpart(module: Module) -> Module | None:
    """Return this module without FP8, or None. Raises `NoCounterpart`."""
    for stack in stacks():
        uses = {layer.use for layer in stack.recognise(module, {})}
        if "storage" in uses:
            raise NoCounterpart(f"its weights are stored in low precision ({type(module).__name__})")
        if uses:
            return stack.bf16_counterpart(module) if "training" in uses else None
    return None


def scaling(module: Module) -> Scaling | None:
    """Return how a module scales, or None."""
    asked = (stack.scaling(module) for stack in stacks() if hasattr(stack, "scaling"))
    return next(filter(None, asked), None)


def casts_of(module: Module) -> dict[str, Cast]:
    """Return how a module casts ``input``, ``weight`` and ``gradient``, as far as its stack tells."""
    asked = (stack.casts(module) for stack in stacks() if hasattr(stack, "casts"))
    return next(filter(None, asked), {})
