"""Which arms a trial has: the job as it is, the best BF16 of the same model, and what the checks would change."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from fp8doctor.facts import Facts
from fp8doctor.measured import uses_fp8
from fp8doctor.prescription import Step
from fp8doctor.trial.bench import SELF_CHECK
from fp8doctor.trial.treatments import compile_blocks, strip_compile_marks, to_bf16, to_float8
from fp8doctor.trial.variant import ArmPlan, Variant

Change = Callable[[Variant], Variant]

RECIPES = ("tensorwise", "rowwise")
"""torchao recipes that are tried on a model without FP8."""


def arms(facts: Facts, prescription: Sequence[Step]) -> list[ArmPlan]:
    """The arms for these facts, the most important first."""
    lists = [blocks.name for blocks in facts.network.blocks]
    compiled = any(linear.compiled is not None for linear in facts.network.linears)
    in_fp8 = uses_fp8(facts)
    plans = [ArmPlan("as_is", as_it_is, fp8=in_fp8)]
    if in_fp8 or compiled:
        plans.append(ArmPlan("bf16", eager_bf16, fp8=False))
    if in_fp8 or not compiled:
        plans.append(ArmPlan("bf16_compiled", chain(eager_bf16, on_model(compile_blocks, lists=lists)), fp8=False))
    if in_fp8:
        plans += _prescribed(prescription, lists)
    else:
        heads = tuple(linear.name for linear in facts.network.linears if linear.role != "body" or linear.adapter == "adapter")
        for recipe in RECIPES:
            make = chain(on_model(strip_compile_marks), on_model(to_float8, recipe=recipe, skip=heads), on_model(compile_blocks, lists=lists))
            plans.append(ArmPlan(f"float8_{recipe}", make, (f"convert-{recipe}", "compile-blocks" if lists else "compile-model"), fp8=True))
    return [*plans, ArmPlan(SELF_CHECK, eager_bf16, fp8=False)]


def _prescribed(prescription: Sequence[Step], lists: Sequence[str]) -> list[ArmPlan]:
    """One arm for everything that can be carried out on a replica, and one for each part of it where there are several."""
    cures: dict[str, Change] = {
        "compile-blocks": on_model(compile_blocks, lists=lists),
        "compile-model": on_model(compile_blocks, lists=()),
    }
    names = [step.treatment.name for step in prescription]
    chosen = [name for name in cures if name in names]
    if not chosen:
        return []
    whole = ArmPlan("prescribed", chain(*(cures[name] for name in chosen)), tuple(chosen), fp8=True)
    return [whole, *(ArmPlan(name, cures[name], (name,), fp8=True) for name in chosen if len(chosen) > 1)]


def as_it_is(variant: Variant) -> Variant:
    """The step untouched."""
    return variant


def eager_bf16(variant: Variant) -> Variant:
    """FP8 and every compile mark taken out."""
    return replace(variant, model=to_bf16(strip_compile_marks(variant.model)))


def on_model(change: Callable[..., nn.Module], **settings: Any) -> Change:
    """A change of the model as a change of the variant."""
    return lambda variant: replace(variant, model=change(variant.model, **settings))


def chain(*changes: Change) -> Change:
    """One change after the other."""
    return lambda variant: functools.reduce(lambda changed, change: change(changed), changes, variant)
