"""Choose the treatments of a trial: those of findings, and others that the facts make worth a try."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial

from fp8doctor import registry
from fp8doctor.analysis.compile_coverage import is_inside
from fp8doctor.analysis.layer_gain import timed_shapes, to_keep
from fp8doctor.analysis.recipe_support import may_run, own_recipes
from fp8doctor.analysis.treatment_table import (
    AUTOCAST_BF16,
    CHECKPOINTING_OFF,
    COMPILE_BLOCKS,
    KEEP_IN_BF16,
    TE_AUTOCAST,
    traits,
)
from fp8doctor.diagnosis.document import Step
from fp8doctor.diagnosis.treatments import describe
from fp8doctor.facts import Facts, Linear, if_recorded, recorded
from fp8doctor.finding import Treatment
from fp8doctor.loading.job import Job
from fp8doctor.recipes import BY_TREATMENT, TORCHAO, stack_of
from fp8doctor.trial.treatments.bf16 import mostly_fp32
from fp8doctor.trial.treatments.switches import could_be_fused


@dataclass(frozen=True)
class TrialContext:
    """The facts, the job, and the treatments that are carried out first."""

    facts: Facts
    job: Job
    treatments: Collection[str]

    @property
    def in_fp8(self) -> list[Linear]:
        return [linear for linear in self.facts.network.linears if linear.use == "training"]

    @property
    def compiles(self) -> bool:
        """Whether a treatment compiles."""
        return any(traits(name).compiles for name in self.treatments)

    @property
    def compiled(self) -> bool:
        """Whether FP8 layers are compiled after the treatments."""
        return self.compiles or any(linear.compiled is not None for linear in self.in_fp8)

    @property
    def is_one_graph(self) -> bool:
        """Whether one compile mark covers all blocks, and no treatment changes that."""
        whole = any(
            not mark.name
            and mark.get("compiles") is not False
            and mark.form in ("wrapped", "in_place", "assigned_forward")
            for mark in self.facts.get("training.compile_marks", ())
        )
        return whole and bool(self.facts.network.blocks) and not self.compiles


def explorations(context: TrialContext) -> list[str]:
    """List the treatments to try, the one that may save most first."""
    return [
        name
        for name, is_sensible in WORTH_A_TRY.items()
        if name not in context.treatments and if_recorded(is_sensible, context)
    ]


def caches(context: TrialContext) -> bool:
    """Return whether training builds a KV cache that no treatment switches off."""
    return context.facts.get("training.use_cache") is True and COMPILE_BLOCKS not in context.treatments


def checkpoints(context: TrialContext) -> bool:
    """Return whether checkpointing is surely on, and can be switched off from outside."""
    return any(
        each.active is True and (each.form != "called_in_forward" or recorded(each, "flag"))
        for each in context.facts.get("training.checkpointing", ())
    )


def in_fp32(context: TrialContext) -> bool:
    """Return whether the parameters are fp32 and no autocast is on."""
    return context.facts.training.autocast is None and mostly_fp32(context.job.model)


def other_recipe(context: TrialContext, name: str) -> bool:
    """Return whether a recipe is new to compiled Float8Linears or to Transformer Engine, and may run here."""
    recipe = BY_TREATMENT[name]
    if recipe.stack == TORCHAO.name:
        own = [
            each for each in context.in_fp8 if each.stack == "torchao" and each.kind.endswith(".Float8Linear")
        ]
        takes = context.compiled and any(not (recipe.drops_bias and linear.bias) for linear in own)
        known = {linear.recipe for linear in own}
    else:
        known = set(own_recipes(context.facts, opened=TE_AUTOCAST in context.treatments))
        takes = bool(known)
    return takes and recipe.name not in known and may_run(recipe, context.facts)


def blocks_may_gain(context: TrialContext) -> bool:
    """Return whether compiling block by block may gain without a finding; of a BF16 job it is a baseline.

    That is a job in one graph, or repeated blocks with uncompiled ``te.Linear``, not fused modules. Up to
    Transformer Engine 2.19 the graph breaks at every module. Compiling around the breaks still pays with
    enough tokens: 1.10x on an H200 at 4,096 and more, 0.90x at 256 (2.20.2).
    """
    te_is_eager = any(
        stack_of(linear).own_kernels
        and linear.kind.endswith(".Linear")
        and linear.compiled is None
        and any(is_inside(linear, blocks) for blocks in context.facts.network.blocks)
        for linear in context.in_fp8
    )
    return (te_is_eager and not context.compiles) or (bool(context.in_fp8) and context.is_one_graph)


def some_lose(context: TrialContext) -> bool:
    """Return whether some layers, timed alone with compiled casts, lose, but not all."""
    in_fp8 = context.in_fp8
    fused = context.compiled or all(stack_of(each).own_kernels for each in in_fp8)
    return fused and bool(timed_shapes(context.facts)) and 0 < len(to_keep(context.facts)) < len(in_fp8)


WORTH_A_TRY: dict[str, Callable[[TrialContext], bool]] = {
    TE_AUTOCAST: lambda context: any(
        stack_of(each).under_autocast and each.engaged is False for each in context.in_fp8
    ),
    "cache-off": caches,
    AUTOCAST_BF16: in_fp32,
    CHECKPOINTING_OFF: checkpoints,
    KEEP_IN_BF16: some_lose,
    "fused-optimizer": lambda context: could_be_fused(context.job),
    COMPILE_BLOCKS: blocks_may_gain,
    **{name: partial(other_recipe, name=name) for name in BY_TREATMENT},
}
"""Treatment -> whether to try it without a finding, in the order of what they save where they gain."""


def with_timed_shapes(prescription: Sequence[Step], facts: Facts) -> list[Treatment]:
    """Return the proposed treatments; those that a timing of the shapes may refute as these were timed."""
    about_shapes = {
        check.name for check in registry.discover() if check.area == "shapes" and check.severity != "error"
    }
    treatments = []
    for step in prescription:
        treatment: Treatment | None = step.treatment
        by_shape = step.treatment.name == KEEP_IN_BF16 and about_shapes.issuperset(step.names)
        if by_shape and timed_shapes(facts):
            treatment = if_recorded(describe, KEEP_IN_BF16, facts)
        treatments += [treatment] if treatment else []
    return treatments
