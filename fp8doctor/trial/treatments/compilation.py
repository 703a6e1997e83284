"""Compile blocks, layers or the model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fp8doctor.analysis.compile_coverage import has_loop, is_inside, needs_compile
from fp8doctor.analysis.treatment_table import COMPILE_MODEL
from fp8doctor.examine.compile_marks import forward_of_torch, is_called
from fp8doctor.facts import CompileMark, Facts, Linear, recorded
from fp8doctor.stacks.torch_private import behind_compile, compiled_call, original, uncompile_call
from fp8doctor.trial.copies.compiling import give_wrappers_own_code, has_settings
from fp8doctor.trial.copies.depth import cleaned
from fp8doctor.trial.treatments.apply import NotTried, TreatmentContext, modules, root_of
from fp8doctor.trial.treatments.switches import without_cache
from fp8doctor.trial.variant import Variant


def compile_it(variant: Variant, context: TreatmentContext) -> Variant:
    """Compile every block and the FP8 layers outside them; the whole model if it has no blocks."""
    if context.name == COMPILE_MODEL:
        return replace(variant, model=compile_blocks(variant.model, []))
    return replace(variant, model=block_by_block(variant.model, context.facts, outside_blocks(context.facts)))


def compile_layers(variant: Variant, context: TreatmentContext) -> Variant:
    """Compile the uncompiled FP8 layers outside the blocks; compiled modules stay as they are."""
    eager = {linear.name for linear in context.facts.network.linears if linear.compiled is None}
    named = modules(variant.model)
    places = [
        place_of(named, name) for name in outside_blocks(context.facts) if name in eager and name in named
    ]
    if not places:
        raise NotTried("it has no uncompiled FP8 layer outside its blocks")
    compile_places(places, {})
    give_wrappers_own_code(variant.model)
    return variant


def lists_of(facts: Facts) -> list[str]:
    return [blocks.name for blocks in facts.network.blocks if has_loop(blocks)]


def outside_blocks(facts: Facts) -> tuple[str, ...]:
    """Name FP8 layers outside the blocks that need the compiler, such as a converted head."""

    def outside(linear: Linear) -> bool:
        return needs_compile(linear) and not any(is_inside(linear, blocks) for blocks in facts.network.blocks)

    return tuple(linear.name for linear in facts.network.linears if outside(linear))


def block_by_block(model: nn.Module, facts: Facts, others: Sequence[str] = (), **settings: Any) -> nn.Module:
    """Compile every block without the KV cache, which would make each block a version of its own.

    A model without blocks is compiled as a whole: one version serves it, with or without the cache.
    """
    lists = lists_of(facts)
    if lists and recorded(facts, "training.use_cache") and facts.training.use_cache is True:
        without_cache(model)
    return compile_blocks(model, lists, others if lists else (), **settings)


def compile_blocks(
    model: nn.Module, lists: Sequence[str], others: Sequence[str] = (), **settings: Any
) -> nn.Module:
    """Compile the lists' blocks and the ``others``, or the whole model if it has no blocks.

    Compiles in place if that compiles something, else replaces the module by the wrapper. Returns the model.
    """
    model = strip_compile_marks(model)
    named = modules(model)
    places = [place for name in lists if name in named for place in called_within(named[name])]
    if lists and not places:
        raise NotTried(f"it has no blocks in {', '.join(lists)}")
    if not places:
        model = compiled(model, settings)
    else:
        places += [place_of(named, name) for name in others if name in named]
        compile_places(places, settings)
    give_wrappers_own_code(model)
    return model


def without_compile_marks(variant: Variant) -> Variant:
    """Remove every compile mark from the model and the training step."""
    return replace(variant, model=strip_compile_marks(variant.model), step_as_compiled=False)


def compiles_otherwise(model: nn.Module, facts: Facts) -> bool:
    """Return whether the user's compile marks differ from `block_by_block` with default settings.

    Marks only on Linears do nothing in a BF16 model.
    """
    known = facts.training.compile_marks if recorded(facts, "training.compile_marks") else ()
    marks = [each.name for each in known if not _is_idle(each)]
    if {linear.name for linear in facts.network.linears}.issuperset(marks):
        return False
    root, lists = root_of(model), lists_of(facts)
    named, names = modules(root), {id(module): cleaned(name) for name, module in root.named_modules()}
    places = [place for name in lists if name in named for place in called_within(named[name])]
    called = {names[id(parent._modules[child])] for parent, child in places}
    if set(marks) != (called if lists else {""}):
        return True
    return any(has_settings(each) for module in model.modules() for each in _compiled_of(module))


def _is_idle(mark: CompileMark) -> bool:
    return recorded(mark, "compiles") and mark.compiles is False


def _compiled_of(module: nn.Module) -> tuple[Any, ...]:
    """List the objects that may hold this module's compile mark."""
    return module, compiled_call(module), module.__dict__.get("forward"), type(module).forward


def called_within(container: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Find the modules called in a list of blocks.

    These are the blocks, or if a block has no forward, the modules in it that hold a matrix.
    """
    for name, child in container.named_children():
        if is_called(child):
            if any(parameter.dim() > 1 for parameter in child.parameters()):
                yield container, name
        else:
            yield from called_within(child)


def place_of(named: Mapping[str, nn.Module], name: str) -> tuple[nn.Module, str]:
    above, _, child = name.rpartition(".")
    return named[above], child


def compile_places(places: Iterable[tuple[nn.Module, str]], settings: Mapping[str, Any]) -> None:
    for parent, child in places:
        parent._modules[child] = compiled(parent._modules[child], settings)


def compiled(module: nn.Module | None, settings: Mapping[str, Any]) -> Any:
    """Compile the module in place, or wrap it if Dynamo would skip the module's own frame."""
    assert module is not None
    if forward_of_torch(module):
        return torch.compile(module, **settings)
    module.compile(**settings)
    return module


def strip_compile_marks(model: nn.Module) -> nn.Module:
    """Remove every compile mark from ``model``, in place.

    Returns the module inside if the root is a ``torch.compile`` wrapper.
    """
    while (inside := behind_compile(model)) is not None:
        model = inside
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if (inside := behind_compile(child)) is not None:
                setattr(parent, name, inside)
    for module in model.modules():
        uncompile_call(module)
        forward = module.__dict__.get("forward")
        if (eager := original(forward)) is not None:
            module.__dict__["forward"] = eager
        decorated = original(type(module).forward)
        if decorated is not None:
            module.__class__ = type(
                type(module).__name__,
                (type(module),),
                {"forward": decorated, "__module__": type(module).__module__},
            )
    return model
