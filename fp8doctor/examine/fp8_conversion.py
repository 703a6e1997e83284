"""Find what the user's conversion to FP8 loses, and calls of the converter.

torch calls its module registration hooks (public since 2.0) while the replaced Linear is still there, so no
library is patched. The state after loading counts: a restored hook is not lost. A changed class, a root
Linear and a write to ``_modules`` are not seen. A converter that refuses every Linear registers no module, so
its call is read from its trace.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from fp8doctor.examine.walk import Place, Tree, hooks, trains
from fp8doctor.facts import NOT_RECORDED, Conversion, Converter
from fp8doctor.facts.scrub import scrub
from fp8doctor.stacks import is_fp8
from fp8doctor.stacks.code_names import names_in
from fp8doctor.stacks.looking import (
    children_of,
    is_a,
    lineage,
    parameters_of,
    read,
    read_class,
    state_of,
    tensor,
)
from fp8doctor.stacks.torch_private import OPTIMIZED_MODULE
from fp8doctor.stacks.torchao import CONVERTER_HOME, CONVERTER_TRACE

_log = logging.getLogger("fp8doctor")


class Replacement(NamedTuple):
    """An FP8 layer and its predecessor; keeps neither alive."""

    layer: weakref.ref[nn.Module]
    weight: weakref.ref[Any]
    """The predecessor's."""
    lacks: dict[str, Callable[[Place], Any]]
    """Each thing that the predecessor had, as a field of `Conversion`, and if a place still lacks it."""


class ConversionWatch:
    """Notes, as a context, each Linear that an FP8 layer replaces.

    In compiled code the hook does nothing, but compiled code guards it: a slice of a ModuleList in a forward
    registers modules. Call `rest` and keep the hook while such code may run.
    """

    def __init__(self, registered: Callable[[tuple[nn.Module, ...]], None] | None = None) -> None:
        """Pass all registered modules to ``registered``."""
        self.replacements: list[Replacement] = []
        self.registered = registered
        self.resting = False
        self.problem: str | None = None
        """Why something was missed."""
        self.ran_before = False
        """The converter was called before the watching."""

    def __enter__(self) -> ConversionWatch:
        self.ran_before = has_run() is True
        self._removable = register_module_module_registration_hook(self._registered)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        self._removable.remove()

    def rest(self) -> None:
        self.resting = True
        self.replacements.clear()

    def _registered(self, parent: nn.Module, name: str, new: nn.Module | None) -> None:
        """Note a replacement; torch calls this before ``new`` is registered."""
        if torch.compiler.is_compiling() or self.resting:
            return
        try:
            if self.registered is not None and new is not None:
                self.registered((parent, new))
            old = children_of(parent).get(name)
            replaces = new is not old and is_a(old, nn.Linear) and is_a(new, nn.Module)
            if replaces and old is not None and new is not None and is_fp8(new) and not is_fp8(old):
                self.replacements.append(replacement(parent, old, new, tensor(old, "weight")))
        except Exception as error:  # the user's conversion goes on, whatever a class of theirs does here
            _log.debug("a replacement could not be read", exc_info=True)
            what = f"a replacement by {type(new).__qualname__} could not be read"
            self.problem = scrub(f"{what}: {type(error).__name__}: {error}")


def replacement(parent: nn.Module, old: nn.Module, new: nn.Module, weight: Any) -> Replacement:
    """Note what is lost unless it is restored."""
    hooked = hooks(old)
    lacks: dict[str, Callable[[Place], Any]] = {"without_hooks": lambda place: hooks(place.module) < hooked}
    if read_class(type(old), "forward") is not nn.Linear.forward and not is_a(new, type(old)):
        lacks["without_forward"] = lambda place: "forward" not in state_of(place.module)
    if OPTIMIZED_MODULE in lineage(type(parent)):  # the wrapper still calls the predecessor (torch 2.13)
        lacks["bypassed"] = lambda place: place.wrappers
    if not weight.requires_grad:
        lacks["unfrozen"] = lambda place: trains(place.module)
    return Replacement(weakref.ref(new), weakref.ref(weight), lacks)


def examine_conversion(tree: Tree, watch: ConversionWatch | None, gaps: dict[str, str]) -> Any:
    """Return what the layers have lost; ``NOT_RECORDED`` if something was missed."""
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
    lost = {
        name: tuple(place.name for place, each in found if name in each.lacks and each.lacks[name](place))
        for name in ("without_hooks", "without_forward", "bypassed", "unfrozen")
    }
    untied = tuple(
        (f"{place.name}.weight", tree.parameters[key][0])  # where the weight still is
        for place, each in found
        if (key := id(each.weight())) in tree.parameters
        and key not in map(id, parameters_of(place.module).values())
    )
    return Conversion(linears=len(found), untied=untied, **lost)


def examine_converter(watch: ConversionWatch | None) -> Converter:
    """Return the known calls of the converter; an early one may be of any model."""
    ran, unwatched = has_run(), watch is None or watch.ran_before
    return Converter(
        called=None if ran and unwatched else ran,
        replaced=None if watch is None else len(watch.replacements),
    )


def has_run() -> bool | None:
    """Tell if the converter was called; None if torchao leaves no trace."""
    home = sys.modules.get(CONVERTER_HOME)
    if home is None:
        return False
    code = read(vars(home).get("convert_to_float8_training"), "__code__")
    return CONVERTER_TRACE in sys.modules if code is not None and CONVERTER_TRACE in names_in(code) else None
