"""What the user's own conversion loses, seen while it runs.

A converter puts an FP8 layer in the place of a Linear, and torch calls its module registration hooks (public
since 2.0) while the old one is still there. So nothing of any library is patched or imported, and the hook is
taken off again. What counts is how things stand when everything is loaded: a hook that was put back is not
lost. A class that is changed in place, a root Linear and a write to ``_modules`` are not seen.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType, TracebackType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from fp8doctor.examine.compile_marks import compile_mark
from fp8doctor.examine.converter import calls_by_name, has_run
from fp8doctor.examine.kind import Kind
from fp8doctor.examine.walk import Place, Tree, parameters
from fp8doctor.facts import Conversion, Converter
from fp8doctor.facts.scrub import scrub
from fp8doctor.facts.unrecorded import NOT_RECORDED
from fp8doctor.stacks import recognise
from fp8doctor.stacks.looking import (
    children_of,
    class_name,
    is_a,
    lineage,
    parameters_of,
    read,
    read_class,
    state_of,
    tensor,
)
from fp8doctor.stacks.torch_private import OPTIMIZED_MODULE

_log = logging.getLogger("fp8doctor")

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(frozen=True)
class Replacement:
    """An FP8 layer and what its predecessor was. Neither a module nor a weight is kept alive by it."""

    layer: weakref.ref[nn.Module]
    weight: weakref.ref[Any]
    """The weight of the predecessor."""
    hooks: int
    kind: type
    """The predecessor's class."""
    own_forward: bool
    compiled: bool
    wrapped: bool
    """Whether ``torch.compile`` was called on the predecessor, which the wrapper still calls (torch 2.13)."""
    frozen: bool


class Watch:
    """Notes, as a context, every Linear that an FP8 layer takes the place of.

    Its hook does nothing in compiled code, which guards that it is there: a slice of a ModuleList in a
    forward registers modules. Whoever is done while such code may run calls `rest` and leaves the hook.
    """

    def __init__(self, registered: Callable[[tuple[nn.Module, ...]], None] | None = None) -> None:
        """``registered`` is told of all modules that are put into others."""
        self.replacements: list[Replacement] = []
        self.tell = registered
        self.resting = False
        self.problem: str | None = None
        """Why something was missed."""
        self.ran_before = False
        """Whether the converter was called before the watching."""
        self.code: ModuleType | None = None
        """What the user's file became; None for ``__main__``."""

    def __enter__(self) -> Watch:
        self.ran_before = has_run() is True
        self._handle = register_module_module_registration_hook(self._registered)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        self._handle.remove()

    def rest(self) -> None:
        """Note nothing any more."""
        self.resting = True
        self.replacements.clear()

    def _registered(self, parent: nn.Module, name: str, new: nn.Module | None) -> None:
        """Called by torch before ``new`` takes the place of what is there."""
        if torch.compiler.is_compiling() or self.resting:
            return
        try:
            if self.tell is not None and new is not None:
                self.tell((parent, new))
            old = children_of(parent).get(name)
            if (
                old is not None
                and new is not None
                and new is not old
                and is_a(old, nn.Linear)
                and is_a(new, nn.Module)
                and is_fp8(new)
                and not is_fp8(old)
            ):
                self.replacements.append(replacement(parent, old, new, tensor(old, "weight")))
        except Exception as error:  # the user's conversion goes on, whatever a class of theirs does here
            _log.debug("a replacement could not be read", exc_info=True)
            self.problem = scrub(
                f"a replacement by {type(new).__qualname__} could not be read: "
                f"{type(error).__name__}: {error}"
            )


def is_fp8(module: nn.Module) -> bool:
    """Whether a stack takes this very module for FP8 training."""
    return any(layer.use == "training" for layer in recognise(module, {}))


def replacement(parent: nn.Module, old: nn.Module, new: nn.Module, weight: Any) -> Replacement:
    """Tell what is lost unless someone puts it back."""
    return Replacement(
        layer=weakref.ref(new),
        weight=weakref.ref(weight),
        hooks=hooks(old),
        kind=type(old),
        own_forward=read_class(type(old), "forward") is not nn.Linear.forward and not is_a(new, type(old)),
        compiled=(mark := compile_mark(old, "", Kind(type(old)))) is not None and mark.compiles is not False,
        wrapped=OPTIMIZED_MODULE in lineage(type(parent)),
        frozen=not weight.requires_grad,
    )


def hooks(module: nn.Module) -> int:
    """Forward and backward hooks on this very module."""
    return sum(len(state_of(module).get(each, ())) for each in HOOKS)


def examine_conversion(tree: Tree, watch: Watch | None, gaps: dict[str, str]) -> Any:
    """Tell what the layers that are in the model now have lost; None when nobody watched, ``NOT_RECORDED``
    when some of it was missed."""
    if watch is None:
        return None
    if watch.problem:
        gaps["training.conversion"] = watch.problem
        return NOT_RECORDED
    places = {id(place.module): place for place in tree.places}
    found = [
        (place, each)
        for each in watch.replacements
        if (layer := each.layer()) is not None and (place := places.get(id(layer)))
    ]
    forwards = [
        (place, each) for place, each in found if each.own_forward and "forward" not in state_of(place.module)
    ]
    return Conversion(
        linears=len(found),
        without_hooks=names(place for place, each in found if each.hooks > hooks(place.module)),
        without_forward=names(place for place, _ in forwards),
        lost_forwards=tuple(sorted({class_name(each.kind) for _, each in forwards})),
        without_compile=names(place for place, each in found if each.compiled and place.compiled is None),
        bypassed=names(place for place, each in found if each.wrapped and place.wrappers),
        unfrozen=names(
            place
            for place, each in found
            if each.frozen and any(weight is not None and weight.requires_grad for weight in weights(place))
        ),
        untied=untied(tree, found),
    )


def examine_converter(watch: Watch | None, tree: Tree, optimizers: Iterable[Any]) -> Converter:
    """Tell what is known of calls of the converter. One that ran before the watching may be of any model."""
    ran, unwatched = has_run(), watch is None or watch.ran_before
    code = sys.modules["__main__"] if watch is None or watch.code is None else watch.code
    return Converter(
        named=calls_by_name(code),
        called=None if ran and unwatched else ran,
        replaced=None if watch is None else len(watch.replacements),
        idle_copies=None if watch is None else idle_copies(watch, tree, optimizers),
    )


def idle_copies(watch: Watch, tree: Tree, optimizers: Iterable[Any]) -> int:
    """Count converted layers that look like a copy of this model's Linears and that nothing trains.

    0 where they do not all have a Linear of the same shape in the model. A teacher or an average of weights
    is frozen or in evaluation mode, and a second model that trains has an optimizer.
    """
    inside = {id(place.module) for place in tree.places}
    stepped = {
        id(each) for of in optimizers for group in read(of, "param_groups", ()) for each in group["params"]
    }
    beside = [
        layer
        for each in watch.replacements
        if (layer := each.layer()) is not None
        and id(layer) not in inside
        and (weight := tensor(layer, "weight")) is not None
        and weight.requires_grad
        and weight.grad is None
        and layer.training
        and id(weight) not in stepped
    ]
    shapes = Counter(
        tuple(weight.shape)
        for place in tree.places
        if is_a(place.module, nn.Linear) and (weight := tensor(place.module, "weight")) is not None
    )
    copied = Counter(tuple(tensor(each, "weight").shape) for each in beside)  # type: ignore[union-attr]
    return len(beside) if copied <= shapes else 0


def weights(place: Place) -> list[nn.Parameter | None]:
    """Weight and bias of the very module at a place."""
    return list(parameters_of(place.module).values())


def names(places: Iterable[Place]) -> tuple[str, ...]:
    """Their names in the model."""
    return tuple(place.name for place in places)


def untied(tree: Tree, found: list[tuple[Place, Replacement]]) -> tuple[tuple[str, str], ...]:
    """List layers whose predecessor's weight is still another parameter of the model, and no longer
    theirs."""
    others = {id(parameter): name for name, parameter in parameters(tree)}
    pairs = []
    for place, each in found:
        weight = each.weight()
        if weight is not None and id(weight) in others and all(mine is not weight for mine in weights(place)):
            pairs.append((f"{place.name}.weight", others[id(weight)]))
    return tuple(pairs)
