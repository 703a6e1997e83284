"""Which arms a trial has: the job as it is, the best BF16 of the same model, what the checks would change,
and what may help.

An arm's ``base`` is the arm that it changes: its time minus the arm's own is what the change saves. Proposals
change ``as_is``; an exploration changes ``prescribed`` where there is one, else ``as_is``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from fp8doctor.analysis.arms import uses_fp8
from fp8doctor.analysis.compile_coverage import has_loop
from fp8doctor.analysis.treatment_table import family, traits
from fp8doctor.diagnosis.document import Step
from fp8doctor.diagnosis.prescription import held_to_shapes
from fp8doctor.diagnosis.treatments import describe
from fp8doctor.facts import Facts
from fp8doctor.facts.arm_names import ArmName, conversion_to
from fp8doctor.finding import Treatment
from fp8doctor.loading.job import Job
from fp8doctor.trial.explorations import TrialContext, explorations
from fp8doctor.trial.treatments import TreatmentContext, known, strip_compile_marks, to_bf16, treatments
from fp8doctor.trial.treatments.adapters import without_adapters
from fp8doctor.trial.treatments.checkpointing import keep_activations
from fp8doctor.trial.treatments.compilation import block_by_block
from fp8doctor.trial.treatments.precision import mostly_fp32
from fp8doctor.trial.variant import ArmPlan, Change, Variant, as_it_is

RECIPES = ("tensorwise", "rowwise")
"""torchao recipes that are tried on a model without FP8."""


def arms(facts: Facts, prescription: Sequence[Step], job: Job) -> list[ArmPlan]:
    """Plan the arms for these facts, the most important first."""
    builder = ArmBuilder(facts, job)
    proposals = [
        each for each in known(held_to_shapes(prescription, facts)) if not traits(each.name).is_an_arm_already
    ]
    in_fp8 = uses_fp8(facts)
    as_is = ArmPlan(ArmName.AS_IS, as_it_is, fp8=in_fp8)
    prescribed = builder.prescribed(as_is, proposals) if in_fp8 and proposals else None
    base = prescribed or as_is
    return [
        as_is,
        *builder.baselines(in_fp8),
        *([prescribed] if prescribed else [] if in_fp8 else builder.conversions()),
        ArmPlan(ArmName.SELF_CHECK, eager_bf16, fp8=False),
        *(builder.arm(as_is, each) for each in proposals if len(proposals) > 1 or not prescribed),
        *builder.measurements(base),
        *(replace(builder.arm(base, each), explored=True) for each in builder.explored(proposals)),
    ]


@dataclass(frozen=True)
class ArmBuilder:
    """What the arms of one job are made from."""

    facts: Facts
    job: Job

    def baselines(self, in_fp8: bool) -> list[ArmPlan]:
        """Plan eager and compiled BF16, without the one that equals the step as it is."""
        compiled = any(linear.compiled is not None for linear in self.facts.network.linears)
        own, plans = self.own_autocast(), []
        if in_fp8 or compiled or own:
            plans.append(ArmPlan(ArmName.BF16, eager_bf16, own, fp8=False))
        if in_fp8 or not compiled or own:
            plans.append(
                ArmPlan(
                    ArmName.BF16_COMPILED,
                    functools.partial(compiled_bf16, facts=self.facts),
                    own,
                    fp8=False,
                    compiled=True,
                )
            )
        return plans

    def own_autocast(self) -> tuple[str, ...]:
        """Name the treatment that brings an fp32 step without autocast to BF16 before it is compared; none
        elsewhere."""
        return (
            ()
            if self.facts.training.autocast is not None or not mostly_fp32(self.job.model)
            else ("autocast-bf16",)
        )

    def conversions(self) -> list[ArmPlan]:
        """Convert a model without FP8, compiled, one arm for each recipe."""
        compilation = "compile-blocks" if any(map(has_loop, self.facts.network.blocks)) else "compile-model"
        plans = []
        for recipe in RECIPES:
            names = (*self.own_autocast(), f"convert-{recipe}", compilation)
            make = chain(
                on_model(strip_compile_marks),
                *(self.change(Treatment(name=name, summary="", code="")) for name in names),
            )
            plans.append(
                ArmPlan(conversion_to(recipe), make, names, fp8=True, base=ArmName.AS_IS, compiled=True)
            )
        return plans

    def prescribed(self, as_is: ArmPlan, proposals: Sequence[Treatment]) -> ArmPlan:
        """Put everything that can be carried out into one arm."""
        change, names = (
            chain(*(self.change(each) for each in proposals)),
            tuple(each.name for each in proposals),
        )
        ratio = functools.reduce(
            lambda product, each: product * treatments()[each.name].tokens_ratio, proposals, 1.0
        )
        compiled = any(traits(name).compiles for name in names)
        return ArmPlan(
            ArmName.PRESCRIBED,
            change,
            names,
            fp8=True,
            base=as_is.name,
            change=change,
            tokens_ratio=ratio,
            compiled=compiled,
        )

    def arm(self, base: ArmPlan, treatment: Treatment) -> ArmPlan:
        """Put one treatment alone on top of ``base``."""
        change, ratio = self.change(treatment), base.tokens_ratio * treatments()[treatment.name].tokens_ratio
        fp8 = True if treatment.name == "te-autocast" else base.fp8
        compiled = base.compiled or traits(treatment.name).compiles
        return ArmPlan(
            treatment.name,
            chain(base.make, change),
            (treatment.name,),
            fp8,
            base.name,
            change,
            tokens_ratio=ratio,
            compiled=compiled,
        )

    def explored(self, proposals: Iterable[Treatment]) -> list[Treatment]:
        """Describe the treatments that no finding proposes and that may help."""
        context = TrialContext(self.facts, self.job, {each.name for each in proposals})
        return [described for name in explorations(context) if (described := describe(name, self.facts))]

    def measurements(self, base: ArmPlan) -> list[ArmPlan]:
        """Plan arms that tell the share of something and are never prescribed."""
        plans = []
        unasked = explorations(TrialContext(self.facts, self.job, ()))
        if "checkpointing-off" in unasked and uses_fp8(self.facts):
            compiled = TrialContext(self.facts, self.job, base.treatments).compiled
            make = chain(
                functools.partial(compiled_bf16, facts=self.facts) if compiled else eager_bf16,
                on_model(keep_activations),
            )
            plans.append(
                ArmPlan(
                    ArmName.BF16_WITHOUT_CHECKPOINTING,
                    make,
                    fp8=False,
                    base=ArmName.BF16_COMPILED if compiled else ArmName.BF16,
                    explored=True,
                    compiled=compiled,
                )
            )
        if self.facts.network.adapter_parameters:
            plans.append(
                ArmPlan(
                    ArmName.WITHOUT_ADAPTERS,
                    chain(base.make, without_adapters),
                    fp8=base.fp8,
                    base=base.name,
                    explored=True,
                    compiled=base.compiled,
                )
            )
        return plans

    def change(self, treatment: Treatment) -> Change:
        """Turn a treatment into a change of the variant."""
        context = TreatmentContext(self.facts, treatment.name, treatment.layers, self.job)
        return lambda variant: treatments()[treatment.name].function(variant, context)


def together(base: ArmPlan, winners: Sequence[ArmPlan], name: str) -> ArmPlan:
    """Put ``base`` and the arms that gained on top of it into one; of one family the last stands."""
    replaced = {family(treatment) for winner in winners for treatment in winner.treatments}
    kept = [treatment for treatment in base.treatments if family(treatment) not in replaced]
    change = chain(base.change, *(winner.change for winner in winners))
    added = [treatment for winner in winners for treatment in winner.treatments]
    ratio = functools.reduce(
        lambda product, winner: product * winner.tokens_ratio / base.tokens_ratio, winners, base.tokens_ratio
    )
    compiled = any(plan.compiled for plan in (base, *winners))
    return ArmPlan(
        name,
        change,
        (*kept, *added),
        base.fp8 or winners[0].fp8,
        ArmName.AS_IS,
        change,
        tokens_ratio=ratio,
        compiled=compiled,
    )


def eager_bf16(variant: Variant) -> Variant:
    """Take FP8 and every compile mark out."""
    return in_bf16(replace(variant, model=to_bf16(strip_compile_marks(variant.model))))


def compiled_bf16(variant: Variant, facts: Facts) -> Variant:
    """Take FP8 out and compile block by block."""
    return in_bf16(
        replace(
            variant, model=block_by_block(to_bf16(strip_compile_marks(variant.model), compiled=True), facts)
        )
    )


def in_bf16(variant: Variant) -> Variant:
    """Add BF16 autocast where the parameters are fp32 and nothing else makes the GEMMs BF16."""
    return (
        replace(variant, autocast=torch.bfloat16)
        if variant.autocast is None and mostly_fp32(variant.model)
        else variant
    )


def on_model(change: Callable[..., nn.Module], **settings: Any) -> Change:
    """Turn a change of the model into a change of the variant."""
    return lambda variant: replace(variant, model=change(variant.model, **settings))


def chain(*changes: Change) -> Change:
    """Apply one change after the other."""
    return lambda variant: functools.reduce(lambda changed, change: change(changed), changes, variant)
