"""Recognize FP8 layers: one module per FP8 implementation (stack), found by being here.

A stack never imports its library. It has

- ``ORDER``: the stacks are asked in ascending order, and the first that knows a module describes it.
- ``recognise(module, gaps)``: the module's own layers, empty if unknown. ``gaps`` takes what cannot be read.
- ``bf16_counterpart(module)``, if its layers train: the same work in 16 bits over the same weights,
  in a new module or the changed one. Raises `NoCounterpart`.
- perhaps ``PREFIX``, the packages of its classes; ``scaling(module)``; ``casts(module)``, of its operands.
"""

from __future__ import annotations

import functools
import importlib
import logging
import pkgutil
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakKeyDictionary

from fp8doctor.facts import Scaling, Use
from fp8doctor.facts.scrub import scrub
from fp8doctor.stacks.looking import lineage

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


_ASKED: WeakKeyDictionary[type, tuple[Any, ...]] = WeakKeyDictionary()


def stacks_of(kind: type) -> tuple[Any, ...]:
    """List the stacks that may know a class, in the order of asking."""
    asked = _ASKED.get(kind)
    if asked is None:
        homes = [module for module, _ in lineage(kind)]
        asked = _ASKED[kind] = tuple(
            stack
            for stack in stacks()
            if (prefix := getattr(stack, "PREFIX", None)) is None
            or any(home.startswith(prefix) for home in homes)
        )
    return asked


@functools.cache
def stacks() -> tuple[Any, ...]:
    modules = (importlib.import_module(f"{__name__}.{each.name}") for each in pkgutil.iter_modules(__path__))
    found = [each for each in modules if hasattr(each, "recognise")]
    return tuple(sorted(found, key=lambda each: each.ORDER))


def recognise(module: Module, gaps: dict[str, str]) -> tuple[Layer, ...]:
    """Describe this module's own linear layers; none if a stack cannot read it."""
    for stack in stacks_of(type(module)):
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


def bf16_counterpart(module: Module) -> Module | None:
    """Return this module without FP8, or None. Raises `NoCounterpart`."""
    for stack in stacks_of(type(module)):
        uses = {layer.use for layer in stack.recognise(module, {})}
        if "storage" in uses:
            raise NoCounterpart(f"its weights are stored in low precision ({type(module).__name__})")
        if uses:
            return stack.bf16_counterpart(module) if "training" in uses else None
    return None


def _first(module: Module, name: str) -> Any:
    """Ask the stacks that have this function; return the first answer, or None."""
    asked = (getattr(stack, name, None) for stack in stacks_of(type(module)))
    return next((found for ask in asked if ask and (found := ask(module))), None)


def scaling(module: Module) -> Scaling | None:
    found: Scaling | None = _first(module, "scaling")
    return found


def casts_of(module: Module) -> dict[str, Cast]:
    """Return how a module casts ``input``, ``weight`` and ``gradient``, as far as its stack tells."""
    return _first(module, "casts") or {}
