"""Choose treatments that no finding proposed and the facts make worth a try."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from fp8doctor.analysis.compile_coverage import is_inside
from fp8doctor.analysis.layer_gain import timed_shapes, to_keep
from fp8doctor.analysis.recipe_support import may_run, own_recipes
from fp8doctor.analysis.treatment_table import (
    COMPILE_BLOCKS,
    TE_AUTOCAST,
    TREATMENTS,
    TreatmentRecord,
    traits,
)
from fp8doctor.facts import Facts, Linear, if_recorded, recorded
from fp8doctor.loading.job import Job
from fp8doctor.recipes import BY_TREATMENT, stack_of
from fp8doctor.trial.treatments.bf16 import mostly_fp32
from fp8doctor.trial.treatments.switches import could_be_fused


@dataclass(frozen=True)
class TrialContext:
    """The facts, the job, and the treatments that findings proposed."""

    facts: Facts
    job: Job
    proposed: Collection[str]

    @property
    def in_fp8(self) -> list[Linear]:
        return [linear for linear in self.facts.network.linears if linear.use == "training"]

    @property
    def compiled(self) -> bool:
        """Whether FP8 layers are compiled after the proposals."""
        return any(name.startswith("compile-") for name in self.proposed) or any(
            linear.compiled is not None for linear in self.in_fp8
        )


def explorations(context: TrialContext) -> list[str]:
    names = [
        each.name
        for each in TREATMENTS.values()
        if each.tried_if and each.name not in context.proposed and if_recorded(is_sensible, each, context)
    ]
    return sorted(names, key=lambda name: -traits(name).saves)


def is_sensible(treatment: TreatmentRecord, context: TrialContext) -> bool:
    decide = globals()[treatment.tried_if]
    return bool(decide(context, treatment.name) if treatment.recipe else decide(context))


def te_is_idle(context: TrialContext) -> bool:
    """Return whether Transformer Engine layers last ran outside the FP8 autocast."""
    return any(stack_of(linear).under_autocast and linear.engaged is False for linear in context.in_fp8)


def caches(context: TrialContext) -> bool:
    return (
        recorded(context.facts, "training.use_cache")
        and context.facts.training.use_cache is True
        and COMPILE_BLOCKS not in context.proposed
    )


def checkpoints(context: TrialContext) -> bool:
    """Return whether checkpointing is surely on, and can be switched off from outside."""
    return recorded(context.facts, "training.checkpointing") and any(
        each.active is True and (each.form != "called_in_forward" or recorded(each, "flag"))
        for each in context.facts.training.checkpointing
    )


def in_fp32(context: TrialContext) -> bool:
    return (
        recorded(context.facts, "training.autocast")
        and context.facts.training.autocast is None
        and mostly_fp32(context.job.model)
    )


def other_recipe(context: TrialContext, name: str) -> bool:
    """Return whether a recipe is new to compiled Float8Linears, and may run here."""
    recipe = BY_TREATMENT[name]
    own = [
        linear
        for linear in context.in_fp8
        if linear.kind.startswith("torchao.float8.")
        or (linear.stack == "torchao" and linear.kind.endswith(".Float8Linear"))
    ]
    taken = [linear for linear in own if not (recipe.drops_bias and linear.bias)]
    is_new = recipe.name not in {linear.recipe for linear in own}
    return bool(taken) and is_new and context.compiled and may_run(recipe, context.facts)


def other_te_recipe(context: TrialContext, name: str) -> bool:
    """Return whether a recipe is new to Transformer Engine layers, and may run here."""
    own = own_recipes(context.facts, opened=TE_AUTOCAST in context.proposed)
    recipe = BY_TREATMENT[name]
    return bool(own) and recipe.name not in own and may_run(recipe, context.facts)


def optimizer_is_unfused(context: TrialContext) -> bool:
    return could_be_fused(context.job)


def blocks_may_gain(context: TrialContext) -> bool:
    """Return whether compiling block by block may gain without a finding; of a BF16 job it is a baseline."""
    return te_is_eager(context) or (bool(context.in_fp8) and is_one_graph(context))


def is_one_graph(context: TrialContext) -> bool:
    """Return whether one compile mark covers all blocks, and no proposal changes that."""
    marks = context.facts.training.compile_marks if recorded(context.facts, "training.compile_marks") else ()
    whole = any(
        mark.name == ""
        and not (recorded(mark, "compiles") and mark.compiles is False)
        and mark.form in ("wrapped", "in_place", "assigned_forward")
        for mark in marks
    )
    return (
        whole
        and bool(context.facts.network.blocks)
        and not any(name.startswith("compile-") for name in context.proposed)
    )


def te_is_eager(context: TrialContext) -> bool:
    """Return whether repeated blocks hold uncompiled ``te.Linear``, not fused modules.

    Up to Transformer Engine 2.19 the graph breaks at every module. Compiling around the breaks still pays
    with enough tokens: 1.10x on an H200 at 4,096 and more, 0.90x at 256 (2.20.2).
    """
    blocks = context.facts.network.blocks
    eager = [
        linear
        for linear in context.in_fp8
        if stack_of(linear).own_kernels and linear.kind.endswith(".Linear") and linear.compiled is None
    ]
    return any(is_inside(linear, each) for linear in eager for each in blocks) and not any(
        name.startswith("compile-") for name in context.proposed
    )


def some_lose(context: TrialContext) -> bool:
    """Return whether some layers, timed alone with compiled casts, lose, but not all."""
    if (
        not context.in_fp8
        or not timed_shapes(context.facts)
        or not (context.compiled or all(stack_of(each).own_kernels for each in context.in_fp8))
    ):
        return False
    kept = to_keep(context.facts)
    return 0 < len(kept) < len(context.in_fp8)
