"""Apply treatments: their functions may replace a Parameter, which variants share, but never write to one."""

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, cast

from torch import nn

from fp8doctor.analysis.layers import KEEP_IT_IN_MODULE
from fp8doctor.analysis.treatment_table import TREATMENTS, traits
from fp8doctor.facts import Facts
from fp8doctor.finding import Treatment
from fp8doctor.loading.job import Job
from fp8doctor.stacks import NoCounterpart
from fp8doctor.stacks.looking import modules_of
from fp8doctor.stacks.torch_private import behind_compile, compile_call, compiled_call, context_of
from fp8doctor.trial.copies.depth import cleaned
from fp8doctor.trial.copies.step import Variant


class NotTried(NoCounterpart):
    """The treatment does not apply to this model or cannot be applied here."""


@dataclass(frozen=True)
class TreatmentContext:
    """A treatment's input in addition to the variant."""

    facts: Facts
    name: str
    layers: tuple[str, ...] = ()
    """Modules that it changes, by their names in the facts; empty if its name says it all."""
    job: Job | None = None
    """None on a live model, whose step is not known."""


CarryOut = Callable[[Variant, TreatmentContext], Variant]


@cache
def function_of(name: str) -> CarryOut:
    file, _, function = traits(name).runs.partition(".")
    module = importlib.import_module(f"{__name__.rpartition('.')[0]}.{file}")
    return cast(CarryOut, getattr(module, function))


def known(prescribed: Iterable[Treatment]) -> list[Treatment]:
    """Keep the treatments that can be applied, in order: those that compile come last."""
    return sorted(
        (each for each in prescribed if each.name in TREATMENTS),
        key=lambda each: traits(each.name).compiles,
    )


def modules(model: nn.Module) -> dict[str, nn.Module]:
    """Map names as in the facts to modules; a wrapper's name means the module inside."""
    return {cleaned(name): module for name, module in modules_of(model)}


def swap(model: nn.Module, make: Callable[[str, nn.Module], nn.Module | None]) -> nn.Module:
    """Replace each module by ``make(name, module)``, and return the model or its replacement.

    If that is None, the module stays and its children are visited. A replacement keeps the compile mark.
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
                made[id(module)] = (module, new)
                if inside is None and (call := context_of(compiled_call(module))) is not None:
                    compile_call(new, call)
                if inside is None and (forward := context_of(module.__dict__.get("forward"))) is not None:
                    new.__dict__["forward"] = forward(new.forward)
        return made[id(module)][1]

    def wrapped_anew(wrapper: nn.Module, inside: nn.Module, name: str) -> nn.Module:
        inner, context = visit(inside, name), context_of(wrapper)
        return wrapper if inner is inside or context is None else cast(nn.Module, context(inner))

    return visit(model, "")


class CarriedOut(NamedTuple):
    """A live model after treatments."""

    model: nn.Module
    """The one that was given, changed in place, if that was possible."""
    done: tuple[Treatment, ...]
    left: tuple[str, ...]
    """The others, each with its reason."""
    replaced: bool
    """Parameters are others than before, so the optimizer has to be made again."""


def carry_out(prescribed: Iterable[Treatment], model: nn.Module, facts: Facts) -> CarriedOut:
    """Change a live model as the timed copies were changed."""
    prescribed = tuple(prescribed)
    left = [f"{each.name} (by hand: {each.summary})" for each in prescribed if each.name not in TREATMENTS]
    done: list[Treatment] = []
    before = [id(parameter) for parameter in model.parameters()]
    for each in known(prescribed):
        changes = traits(each.name).changes
        if changes != "model":
            left.append(f"{each.name} (it changes {changes})")
            continue
        try:
            holder, root = root_of(model)
            context = TreatmentContext(facts, each.name, each.layers)
            changed = function_of(each.name)(Variant(root, batch=None), context).model
        except NoCounterpart as error:
            left.append(f"{each.name} ({error})")
            continue
        done.append(each)
        if holder is None:
            model = changed
        elif changed is not root:
            holder.module = changed
    replaced = bool(set(map(id, model.parameters())) - set(before))
    return CarriedOut(model, tuple(done), tuple(left), replaced)


def root_of(model: nn.Module) -> tuple[nn.Module | None, nn.Module]:
    """Return the last wrapper such as DistributedDataParallel, if any, and the model that the facts name."""
    holder: nn.Module | None = None
    while True:
        held = behind_compile(model)
        inside: Any = model if held is None else held
        if type(inside).__name__ not in KEEP_IT_IN_MODULE:
            return holder, model
        holder, model = inside, inside.module
