"""How a treatment is carried out, found by its name.

A function decorated with `carries_out` takes a variant of the step and a context, and returns the variant
changed. It works on a replica, which holds the Parameters of every other arm: it may replace a Parameter, and
never writes to one.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import cast

from torch import nn

from fp8doctor.analysis.treatment_table import traits
from fp8doctor.facts import Facts
from fp8doctor.finding import Treatment
from fp8doctor.loading.job import Job
from fp8doctor.stacks.looking import behind_compile
from fp8doctor.trial.copies.compiling import context_of
from fp8doctor.trial.copies.depth import cleaned
from fp8doctor.trial.variant import Variant


class NotTried(Exception):
    """The treatment does not apply to this model or cannot be carried out here."""


@dataclass(frozen=True)
class TreatmentContext:
    """What a treatment knows beside the variant that it changes."""

    facts: Facts
    name: str
    """Name of the treatment, for a function that knows several."""
    layers: tuple[str, ...] = ()
    """Modules that it is for, as the facts name them; empty when its name says it all."""
    job: Job | None = None
    """None on a live model, where no step is known."""


CarryOut = Callable[[Variant, TreatmentContext], Variant]


@dataclass(frozen=True)
class TreatmentImpl:
    """The function that carries a treatment out, and what it changes."""

    name: str
    function: CarryOut
    changes: str
    """``model`` when it changes the model alone, so that a live model can be given it; else what it changes,
    in words."""
    tokens_ratio: float
    """Tokens of the step that it makes / tokens before."""


_REGISTERED: dict[str, TreatmentImpl] = {}


def carries_out(
    *names: str, changes: str = "model", tokens_ratio: float = 1.0
) -> Callable[[CarryOut], CarryOut]:
    """Register a function under the names of the treatments that it carries out."""

    def register(function: CarryOut) -> CarryOut:
        for name in names:
            _REGISTERED[name] = TreatmentImpl(name, function, changes, tokens_ratio)
        return function

    return register


@cache
def treatments() -> dict[str, TreatmentImpl]:
    """Return every treatment that can be carried out, by its name."""
    package = importlib.import_module(__name__.rpartition(".")[0])
    for each in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{each.name}")
    return _REGISTERED


def known(prescribed: Iterable[Treatment]) -> list[Treatment]:
    """Keep those that can be carried out, in the order in which they have to be: what is compiled has to be
    there first."""
    return sorted(
        (each for each in prescribed if each.name in treatments()),
        key=lambda each: traits(each.name).compiles,
    )


def modules(model: nn.Module) -> dict[str, nn.Module]:
    """Map the names that the facts have to the modules: of a wrapped module the one inside."""
    return {cleaned(name): module for name, module in model.named_modules()}


def swap(model: nn.Module, make: Callable[[str, nn.Module], nn.Module | None]) -> nn.Module:
    """Put what ``make`` returns for a module and its name in that module's place.

    None leaves the module and looks inside. A compile mark goes with the place. Returns the model, or what
    stands for it.
    """
    made: dict[int, tuple[nn.Module, nn.Module]] = {}

    def visit(module: nn.Module, name: str) -> nn.Module:
        if id(module) not in made:
            made[id(module)] = (module, module)
            inside = behind_compile(module)
            new = make(name, module) if inside is None else wrapped_anew(module, inside, name)
            if new is None or new is module:
                for child_name, child in list(module.named_children()) if inside is None else []:
                    changed = visit(child, cleaned(f"{name}.{child_name}".lstrip(".")))
                    if changed is not child:
                        setattr(module, child_name, changed)
            else:
                made[id(module)] = (module, _marked_alike(new, module))
        return made[id(module)][1]

    def wrapped_anew(wrapper: nn.Module, inside: nn.Module, name: str) -> nn.Module:
        inner, context = visit(inside, name), context_of(wrapper)
        return wrapper if inner is inside or context is None else cast(nn.Module, context(inner))

    return visit(model, "")


def _marked_alike(new: nn.Module, old: nn.Module) -> nn.Module:
    """Give ``new`` the compile mark of ``old``."""
    if behind_compile(old) is not None:
        return new
    call, forward = (
        context_of(getattr(old, "_compiled_call_impl", None)),
        context_of(old.__dict__.get("forward")),
    )
    if call is not None:
        new._compiled_call_impl = call(new._call_impl)
    if forward is not None:
        new.__dict__["forward"] = forward(new.forward)
    return new
