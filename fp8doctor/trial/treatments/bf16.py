"""Run FP8 layers, parameters, adapters or the whole step in BF16, or the step without its adapters."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable
from dataclasses import replace

import torch
from torch import nn

from fp8doctor.analysis.trial_view import TrialView
from fp8doctor.facts import Facts
from fp8doctor.facts.arm_names import BF16_BASELINES, ArmName
from fp8doctor.stacks import NoCounterpart, bf16_counterpart
from fp8doctor.stacks.tensors import with_tensors
from fp8doctor.trial.copies.compiling import give_wrappers_own_code
from fp8doctor.trial.treatments.apply import NotTried, TreatmentContext, modules, swap
from fp8doctor.trial.treatments.compilation import block_by_block, compile_blocks, without_compile_marks
from fp8doctor.trial.variant import Change, Variant


def keep_in_bf16(variant: Variant, context: TreatmentContext) -> Variant:
    """Leave the named layers in BF16, as a filter of the conversion would."""
    if not context.layers:
        raise NotTried("the finding names no layers")
    covered = {linear.name for linear in context.facts.network.linears if linear.compiled is not None}
    return replace(
        variant,
        model=to_bf16(
            variant.model, compiled=bool(covered.intersection(context.layers)), only=context.layers
        ),
    )


def stay_in_bf16(variant: Variant, context: TreatmentContext) -> Variant:
    """Leave no layer in FP8, in the plan's form of BF16; compiled if none was timed."""
    best = TrialView(context.facts).bf16_of_the_plan
    form = best.name if best and best.name in BF16_BASELINES else ArmName.BF16_COMPILED
    return in_form(form, context.facts)(variant)


def in_form(form: str, facts: Facts) -> Change:
    """Return the change that makes this form of BF16.

    `fp8doctor.diagnosis.treatments` has the lines that a user would write for it.
    """
    forms: dict[str, Change] = {
        ArmName.BF16: eager_bf16,
        ArmName.BF16_COMPILED: functools.partial(compiled_bf16, facts=facts),
        ArmName.BF16_AS_COMPILED: bf16_as_compiled,
        ArmName.BF16_WHOLE: bf16_whole,
    }
    return forms[form]


def eager_bf16(variant: Variant) -> Variant:
    bare = without_compile_marks(variant)
    return _under_autocast(replace(bare, model=to_bf16(bare.model)))


def compiled_bf16(variant: Variant, facts: Facts) -> Variant:
    bare = without_compile_marks(variant)
    return _under_autocast(replace(bare, model=block_by_block(to_bf16(bare.model, compiled=True), facts)))


def bf16_whole(variant: Variant) -> Variant:
    bare = without_compile_marks(variant)
    return _under_autocast(replace(bare, model=compile_blocks(to_bf16(bare.model, compiled=True), [])))


def bf16_as_compiled(variant: Variant) -> Variant:
    model = to_bf16(variant.model, compiled=True)
    give_wrappers_own_code(model)
    return _under_autocast(replace(variant, model=model))


def _under_autocast(variant: Variant) -> Variant:
    """Add BF16 autocast if the parameters are fp32 and nothing else makes the matmuls BF16."""
    missing = variant.autocast is None and mostly_fp32(variant.model)
    return replace(variant, autocast=torch.bfloat16) if missing else variant


def to_bf16(model: nn.Module, compiled: bool = False, only: Collection[str] | None = None) -> nn.Module:
    """Replace FP8 training layers (all, or those in ``only``) by BF16 ones over the same Parameters.

    ``compiled`` says whether torch.compile will cover them. Raises `NotTried` if a layer has no BF16
    counterpart, or if the truncated model has none of the named layers.
    """
    done = 0

    def counterpart(name: str, module: nn.Module) -> nn.Module | None:
        nonlocal done
        if only is not None and not belongs(name, only):
            return None
        try:
            found = bf16_counterpart(module, compiled)
        except NoCounterpart as error:
            raise NotTried(str(error)) from None
        done += found is not None
        return found

    model = swap(model, counterpart)
    if only is not None and not done:
        raise NotTried("none of its layers is in FP8 in the part of the model that is timed")
    return model


def belongs(name: str, only: Collection[str]) -> bool:
    """Return whether ``only`` names the module, a part such as ``mlp.fc1``, or a module that holds it."""
    return bool(name) and any(
        name == each or each.startswith(f"{name}.") or name.startswith(f"{each}.") for each in only
    )


def autocast_bf16(variant: Variant, context: TreatmentContext) -> Variant:
    """Run forward and loss under autocast, and leave the parameters as they are."""
    if variant.autocast is not None:
        raise NotTried(
            f"the step runs under autocast already ({str(variant.autocast).removeprefix('torch.')})"
        )
    return replace(variant, autocast=torch.bfloat16)


def bf16_parameters(variant: Variant, context: TreatmentContext) -> Variant:
    """Turn every fp32 parameter, and every fp32 tensor of the batch, into BF16; buffers stay."""
    if not with_parameters(variant.model.modules(), torch.float32, torch.bfloat16):
        raise NotTried("it has no parameter in fp32")
    return replace(
        variant,
        batch=with_tensors(
            variant.batch, lambda each: each.bfloat16() if each.dtype == torch.float32 else each
        ),
    )


def mostly_fp32(model: nn.Module) -> bool:
    sizes = [(parameter.dtype == torch.float32, parameter.numel()) for parameter in model.parameters()]
    return 2 * sum(size for fp32, size in sizes if fp32) > sum(size for _, size in sizes)


def with_parameters(modules: Iterable[nn.Module], old: torch.dtype, new: torch.dtype) -> int:
    """Replace every Parameter of dtype ``old`` by one of ``new``, keep ties, and return how many.

    The old ones are not written to: other variants share them.
    """
    made: dict[int, nn.Parameter] = {}
    for module in modules:
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.dtype == old:
                if id(parameter) not in made:
                    made[id(parameter)] = nn.Parameter(
                        parameter.detach().to(new), requires_grad=parameter.requires_grad
                    )
                module._parameters[name] = made[id(parameter)]
    return len(made)


def adapters_to_bf16(variant: Variant, context: TreatmentContext) -> Variant:
    names = {linear.name for linear in context.facts.network.linears if linear.adapter == "adapter"}
    inside = {
        name: module
        for name, module in modules(variant.model).items()
        if any(name == each or name.startswith(f"{each}.") for each in names)
    }
    if not with_parameters(inside.values(), torch.float32, torch.bfloat16):
        raise NotTried("it has no adapter in fp32")
    return variant
