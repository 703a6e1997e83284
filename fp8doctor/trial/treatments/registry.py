"""How a treatment is carried out, found by its name.

The function that a treatment's record names takes a variant of the step and a context, and returns the
changed variant. It works on a replica, which holds the Parameters of every other arm: it may replace a
Parameter, and never writes to one.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import cast

from torch import nn

from fp8doctor.analysis.treatment_table import TREATMENTS, traits
from fp8doctor.facts import Facts
from fp8doctor.finding import Treatment
from fp8doctor.loading.job import Job
from fp8doctor.stacks.torch_private import behind_compile, compile_call, compiled_call, context_of
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


@cache
def function_of(name: str) -> CarryOut:
    """Return the function that carries a treatment out."""
    file, _, function = traits(name).runs.partition(".")
    module = importlib.import_module(f"{__name__.rpartition('.')[0]}.{file}")
    return cast(CarryOut, getattr(module, function))


def known(prescribed: Iterable[Treatment]) -> list[Treatment]:
    """Keep those that can be carried out, in the order in which they have to be: what is compiled has to be
    there first."""
    return sorted(
        (each for each in prescribed if each.name in TREATMENTS),
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
        context_of(compiled_call(old)),
        context_of(old.__dict__.get("forward")),
    )
    if call is not None:
        compile_call(new, call)
    if forward is not None:
        new.__dict__["forward"] = forward(new.forward)
    return new
