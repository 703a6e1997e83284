"""The stacks: one file for each FP8 implementation; none imports its library.

A stack is a module with ``ORDER`` and ``recognise``; adding a file adds a stack. The ordinary layers come
last. One that knows its layers by their class alone says in ``PREFIX`` where those classes are from. One
whose layers keep a record of how they scale has ``scaling(module)`` too, one that keeps FP8 weights between
steps ``fp8_copies(module)``.
"""

from __future__ import annotations

import functools
import importlib
import logging
import pkgutil
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol, cast
from weakref import WeakKeyDictionary

from fp8doctor.facts import Scaling, Use
from fp8doctor.facts.scrub import scrub
from fp8doctor.stacks.lineage import lineage

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

_log = logging.getLogger("fp8doctor")


@dataclass(frozen=True)
class Layer:
    """One linear-like layer as a stack describes it; most modules are one, a fused MLP is two."""

    kind: str
    """Qualified name of the class that was recognised, which a user's own class may derive from."""
    stack: str
    use: Use
    in_features: int
    out_features: int
    weights: tuple[Tensor, ...]
    dtype: str
    bias: bool = False
    part: str = ""
    """What stands behind the module's name, such as ``fc1``; empty when the module is the layer."""
    gemms: int = 1
    recipe: str | None = None
    features: dict[str, bool | int | str | None] = field(default_factory=dict)
    engaged: bool | None = None
    """Also ``NOT_RECORDED``, with a gap, where the library keeps its record elsewhere."""
    weight_class: str | None = None
    role: Literal["body", "router", "experts"] = "body"


class NoTwin(Exception):
    """A layer has no form in BF16 over its own weights; the message says why."""


class Stack(Protocol):
    """What a file in this folder offers."""

    ORDER: int
    """Stacks are asked in ascending order; the first that knows a module describes it."""

    def recognise(self, module: Module, gaps: dict[str, str]) -> tuple[Layer, ...]:
        """Describe the layers that this very module is, its children left out; empty when it is none of this
        stack's.

        What cannot be read is named in ``gaps``: dotted path of the fact -> reason.
        """

    def bf16_twin(self, module: Module, compiled: bool) -> Module:
        """Return the work of one of this stack's training layers in 16 bits, over the same weights, as fast
        as its user can have it.

        A new module, or the module itself, changed. ``compiled`` says whether torch.compile will cover it. A
        stack without training layers needs none. Raises `NoTwin`.
        """


_ASKED: WeakKeyDictionary[type, tuple[Stack, ...]] = WeakKeyDictionary()


def stacks_of(kind: type) -> tuple[Stack, ...]:
    """List the stacks that a module of this class may belong to, in the order in which they are asked."""
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
def stacks() -> tuple[Stack, ...]:
    """List all stacks, in the order in which they are asked."""
    found = [importlib.import_module(f"{__name__}.{each.name}") for each in pkgutil.iter_modules(__path__)]
    return tuple(
        sorted(
            (cast(Stack, each) for each in found if hasattr(each, "recognise")), key=lambda each: each.ORDER
        )
    )


def recognise(module: Module, gaps: dict[str, str]) -> tuple[Layer, ...]:
    """Recognise the linear-like layers that this very module is; none where a stack cannot read it."""
    for stack in stacks_of(type(module)):
        try:
            layers = stack.recognise(module, gaps)
        except Exception as error:  # one odd layer must not cost the others
            _log.debug("a layer was left out", exc_info=True)
            gaps["network.linears"] = scrub(
                f"{type(module).__qualname__} was left out: {type(error).__name__}: {error}"
            )
            return ()
        if layers:
            return layers
    return ()


def bf16_twin(module: Module, compiled: bool) -> Module | None:
    """Return this very module without FP8; None for a module that does not train in FP8. Raises `NoTwin`
    where there is no such form."""
    for stack in stacks_of(type(module)):
        uses = {layer.use for layer in stack.recognise(module, {})}
        if "storage" in uses:
            raise NoTwin(f"its weights are stored in low precision ({type(module).__name__})")
        if uses:
            return stack.bf16_twin(module, compiled) if "training" in uses else None
    return None


def scaling(module: Module) -> Scaling | None:
    """Tell how this very module scales; None where no stack keeps a record of it."""
    return next(
        (
            found
            for stack in stacks_of(type(module))
            if hasattr(stack, "scaling") and (found := stack.scaling(module)) is not None
        ),
        None,
    )


def fp8_copies(module: Module) -> list[Tensor]:
    """List tensors in which this module keeps FP8 weights between steps, beside Parameters and buffers."""
    return [each for stack in stacks() if hasattr(stack, "fp8_copies") for each in stack.fp8_copies(module)]
