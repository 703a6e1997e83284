"""Put some FP8 layers, or all of them, back into BF16 (keep-in-bf16, stay-in-bf16)."""

from __future__ import annotations

import functools
from collections.abc import Collection
from dataclasses import replace

import torch
from torch import nn

from fp8doctor.analysis.arms import best_bf16
from fp8doctor.facts import Facts, if_recorded
from fp8doctor.facts.arm_names import BF16_BASELINES, ArmName
from fp8doctor.stacks import NoTwin, bf16_twin
from fp8doctor.trial.copies.compiling import give_wrappers_own_code
from fp8doctor.trial.treatments.apply import NotTried, TreatmentContext, swap
from fp8doctor.trial.treatments.compilation import block_by_block, without_compile_marks
from fp8doctor.trial.treatments.dtypes import mostly_fp32
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
    """Leave no layer in FP8, in the fastest timed form of BF16; compiled if none was timed."""
    best = if_recorded(best_bf16, context.facts)
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
    }
    return forms[form]


def eager_bf16(variant: Variant) -> Variant:
    """Remove FP8 and every compile mark."""
    bare = without_compile_marks(variant)
    return _under_autocast(replace(bare, model=to_bf16(bare.model)))


def compiled_bf16(variant: Variant, facts: Facts) -> Variant:
    """Remove FP8, and compile block by block instead of the user's own marks."""
    bare = without_compile_marks(variant)
    return _under_autocast(replace(bare, model=block_by_block(to_bf16(bare.model, compiled=True), facts)))


def bf16_as_compiled(variant: Variant) -> Variant:
    """Remove FP8, and keep the user's own compile marks with their settings."""
    model = to_bf16(variant.model, compiled=True)
    give_wrappers_own_code(model)
    return _under_autocast(replace(variant, model=model))


def _under_autocast(variant: Variant) -> Variant:
    """Add BF16 autocast if the parameters are fp32 and nothing else makes the GEMMs BF16."""
    missing = variant.autocast is None and mostly_fp32(variant.model)
    return replace(variant, autocast=torch.bfloat16) if missing else variant


def to_bf16(model: nn.Module, compiled: bool = False, only: Collection[str] | None = None) -> nn.Module:
    """Replace FP8 training layers (all, or those in ``only``) by BF16 twins over the same Parameters.

    ``compiled`` says whether torch.compile will cover them. Raises `NotTried` if a layer has no twin, or if a
    cut of the model has none of the named layers.
    """
    done = 0

    def twin(name: str, module: nn.Module) -> nn.Module | None:
        nonlocal done
        if only is not None and not belongs(name, only):
            return None
        try:
            found = bf16_twin(module, compiled)
        except NoTwin as error:
            raise NotTried(str(error)) from None
        done += found is not None
        return found

    model = swap(model, twin)
    if only is not None and not done:
        raise NotTried("none of its layers is in FP8 in the part of the model that is timed")
    return model


def belongs(name: str, only: Collection[str]) -> bool:
    """Whether ``only`` names the module, a part of it such as ``mlp.fc1``, or a module that holds it."""
    return bool(name) and any(
        name == each or each.startswith(f"{name}.") or name.startswith(f"{each}.") for each in only
    )
