"""compile-blocks, compile-model, cuda-graphs: what torch.compile covers, and how its kernels are launched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from fp8doctor.facts import Facts, Linear
from fp8doctor.regions import is_inside, needs_compile
from fp8doctor.trial.compiling import is_wrapper
from fp8doctor.trial.treatments.registry import Case, NotTried, modules, treatment
from fp8doctor.trial.variant import Variant


@treatment("compile-blocks", "compile-model")
def compile_it(variant: Variant, case: Case) -> Variant:
    """Every block, and the FP8 layers beside the blocks; the whole model where there are no blocks."""
    lists = lists_of(case.facts) if case.name == "compile-blocks" else []
    return replace(variant, model=compile_blocks(variant.model, lists, beside(case.facts) if lists else ()))


@treatment("cuda-graphs")
def cuda_graphs(variant: Variant, case: Case) -> Variant:
    """Compiled as by compile-blocks, with the kernels of every region recorded once and launched together."""
    if next(variant.model.parameters()).device.type != "cuda":
        raise NotTried("CUDA graphs need a CUDA device")
    return replace(variant, model=compile_blocks(variant.model, lists_of(case.facts), beside(case.facts), mode="reduce-overhead"))


def lists_of(facts: Facts) -> list[str]:
    """Names of the lists of repeated blocks."""
    return [blocks.name for blocks in facts.network.blocks]


def beside(facts: Facts) -> tuple[str, ...]:
    """FP8 layers that only the compiler makes fast and that are in no list of blocks, such as a converted head."""

    def outside(linear: Linear) -> bool:
        return needs_compile(linear) and not any(is_inside(linear, blocks) for blocks in facts.network.blocks)

    return tuple(linear.name for linear in facts.network.linears if outside(linear))


def compile_blocks(model: nn.Module, lists: Sequence[str], beside: Sequence[str] = (), **settings: Any) -> nn.Module:
    """Compile every block of the lists and the modules beside them, or the whole model when it has no blocks."""
    model = strip_compile_marks(model)
    named = modules(model)
    blocks = [block for name in lists if name in named for block in named[name].children()]
    if lists and not blocks:
        raise NotTried(f"it has no blocks in {', '.join(lists)}")
    for module in (*blocks, *(named[name] for name in beside if name in named)) if blocks else (model,):
        module.compile(**settings)
    return model


def strip_compile_marks(model: nn.Module) -> nn.Module:
    """``model`` without any compile mark, in place; the module inside when the root is a ``torch.compile`` wrapper."""
    while is_wrapper(model):
        model = model._orig_mod  # type: ignore[assignment]
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if is_wrapper(child):
                setattr(parent, name, child._orig_mod)
    for module in model.modules():
        module._compiled_call_impl = None
        forward = module.__dict__.get("forward")
        original = getattr(forward, "_torchdynamo_orig_callable", None)
        if original is not None:
            module.__dict__["forward"] = original
        decorated = getattr(type(module).forward, "_torchdynamo_orig_callable", None)
        if decorated is not None:
            module.__class__ = type(type(module).__name__, (type(module),), {"forward": decorated, "__module__": type(module).__module__})
    return model
