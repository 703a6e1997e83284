"""Run FP8 layers, parameters, adapters or the whole step in BF16, or the step without its adapters."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch
from torch import nn

from fp8doctor.analysis.trial_view import TrialView
from fp8doctor.facts import Facts
from fp8doctor.facts.arm_names import BF16_BASELINES, ArmName
from fp8doctor.stacks import bf16_counterpart
from fp8doctor.trial.copies.compiling import give_wrappers_own_code
from fp8doctor.trial.treatments.apply import NotTried, TreatmentContext, modules, swap
from fp8doctor.trial.treatments.compilation import block_by_block, compile_blocks, without_compile_marks
from fp8doctor.trial.variant import Change, Variant


def keep_in_bf16(variant: Variant, context: TreatmentContext) -> Variant:
    """Leave the named layers in BF16, as a filter of the conversion would."""
    if not context.layers:
        raise NotTried("the finding names no layers")
    covered = {linear.name for linear in context.facts.network.linears if linear.compiled is not None}
    compiled = bool(covered.intersection(context.layers))
    return replace(variant, model=to_bf16(variant.model, compiled=compiled, only=context.layers))


def stay_in_bf16(variant: Variant, context: TreatmentContext) -> Variant:
    """Leave no layer in FP8, in the plan's form of BF16; compiled if none was timed."""
    best = TrialView(context.facts).bf16_of_the_plan
    form = best.name if best and best.name in BF16_BASELINES else ArmName.BF16_COMPILED
    return in_form(form, context.facts)(variant)


def in_form(form: str, facts: Facts) -> Change:
    """Return the change that makes this form of BF16, of `BF16_BASELINES`."""

    def change(variant: Variant) -> Variant:
        bare = variant if form == ArmName.BF16_AS_COMPILED else without_compile_marks(variant)
        model = to_bf16(bare.model, compiled=form != ArmName.BF16)
        if form == ArmName.BF16_AS_COMPILED:
            give_wrappers_own_code(model)
        elif form == ArmName.BF16_COMPILED:
            model = block_by_block(model, facts)
        elif form == ArmName.BF16_WHOLE:
            model = compile_blocks(model, [])
        missing = bare.autocast is None and mostly_fp32(model)
        return replace(bare, model=model, autocast=torch.bfloat16 if missing else bare.autocast)

    return change


def to_bf16(model: nn.Module, compiled: bool = False, only: Collection[str] | None = None) -> nn.Module:
    """Replace FP8 training layers (all, or those in ``only``) by BF16 ones over the same Parameters.

    ``compiled`` says whether torch.compile will cover them. Raises `NoCounterpart`, also if
    the truncated model has none of the named layers.
    """
    done = 0

    def counterpart(name: str, module: nn.Module) -> nn.Module | None:
        nonlocal done
        if only is not None and not belongs(name, only):
            return None
        found = bf16_counterpart(module, compiled)
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


def mostly_fp32(model: nn.Module) -> bool:
    sizes = [(parameter.dtype == torch.float32, parameter.numel()) for parameter in model.parameters()]
    return 2 * sum(size for fp32, size in sizes if fp32) > sum(size for _, size in sizes)


def adapters_to_bf16(variant: Variant, context: TreatmentContext) -> Variant:
    """Replace the adapters' fp32 Parameters, and write to none: other variants share them."""
    names = {linear.name for linear in context.facts.network.linears if linear.adapter == "adapter"}
    made: dict[int, nn.Parameter] = {}
    for name, module in modules(variant.model).items():
        inside = any(name == each or name.startswith(f"{each}.") for each in names)
        for key, old in module._parameters.items() if inside else ():
            if old is not None and old.dtype == torch.float32:
                if id(old) not in made:
                    made[id(old)] = nn.Parameter(old.detach().bfloat16(), requires_grad=old.requires_grad)
                module._parameters[key] = made[id(old)]
    if not made:
        raise NotTried("it has no adapter in fp32")
    return variant
