"""Plan the variants of a trial, in the order of `fp8doctor.trial.copies.step.Place`.

Proposals change ``as_is``; an exploration, which no finding asked for, changes ``prescribed`` if it is there.
"""

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from fp8doctor.analysis.arms import BF16_WITH, uses_fp8
from fp8doctor.analysis.compile_coverage import is_inside, own_compile
from fp8doctor.analysis.layer_gain import to_keep
from fp8doctor.analysis.recipe_support import may_run, own_recipes
from fp8doctor.analysis.treatment_table import (
    AUTOCAST_BF16,
    CHECKPOINTING_OFF,
    COMPILE_BLOCKS,
    COMPILE_MODEL,
    KEEP_IN_BF16,
    TE_AUTOCAST,
    TREATMENTS,
    family,
    traits,
)
from fp8doctor.cost.step_cost import ModelledStep, in_bf16, modelled_step, with_linears_compiled
from fp8doctor.diagnosis.document import Step
from fp8doctor.diagnosis.treatments import describe
from fp8doctor.facts import Facts, Linear, if_recorded, recorded
from fp8doctor.facts.arm_names import NO_CHECKPOINTING, ArmName, bf16_with, conversion_to
from fp8doctor.loading.job import Job
from fp8doctor.recipes import BY_TREATMENT, FASTEST, RECIPES, TORCHAO, stack_of
from fp8doctor.trial.copies.step import Place, Variant, VariantPlan, as_it_is
from fp8doctor.trial.treatments.apply import TreatmentContext, function_of, known
from fp8doctor.trial.treatments.forms import (
    compiles_otherwise,
    could_be_fused,
    in_form,
    mostly_fp32,
    without_compile_marks,
)

HOST_PACED = 0.9
"""Modelled time of the host / of the GPU from which the host may set the pace: five of ten recorded steps."""

Layers = Mapping[str, tuple[str, ...]]
"""Treatment -> the layers that it changes; none if its name says it all."""


@dataclass(frozen=True)
class VariantPlanner:
    """The facts, the job, and the treatments that are carried out first."""

    facts: Facts
    job: Job
    treatments: Collection[str] = ()

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

    @functools.cached_property
    def compiles_otherwise(self) -> bool:
        """Whether the user compiles the job in another form than the trial."""
        return compiles_otherwise(self.job.model, self.facts)

    @functools.cached_property
    def own_autocast(self) -> tuple[str, ...]:
        """The treatment that brings an fp32 step without autocast to BF16, if needed."""
        return (AUTOCAST_BF16,) if if_recorded(in_fp32, self) else ()

    def on(self, base: VariantPlan, treatments: Layers, name: str) -> VariantPlan:
        """Plan treatments, all together, on top of ``base``."""
        forms = [each for each in treatments if each in (COMPILE_BLOCKS, COMPILE_MODEL)]

        def make(variant: Variant) -> Variant:
            variant = base.make(variant)
            for each, layers in treatments.items():
                variant = function_of(each)(variant, TreatmentContext(self.facts, each, layers, self.job))
            return variant

        return VariantPlan(
            name,
            make,
            (*treatments,),
            fp8=True if TE_AUTOCAST in treatments else base.fp8,
            base=base.name,
            compiled=base.compiled or any(traits(each).compiles for each in treatments),
            by_block=forms[-1] == COMPILE_BLOCKS if forms else base.by_block,
        )

    def bf16(self, form: ArmName) -> VariantPlan:
        return VariantPlan(
            form,
            in_form(form, self.facts),
            fp8=False,
            compiled=form != ArmName.BF16,
            by_block=form == ArmName.BF16_COMPILED,
            place=Place.OTHER_BF16,
        )

    def baselines(self, in_fp8: bool) -> list[VariantPlan]:
        """Plan every form of BF16 that the user could write, their own first, but not the step as it is."""
        compiled = any(linear.compiled is not None for linear in self.facts.network.linears)
        own = self.own_autocast
        forms = {
            ArmName.BF16_AS_COMPILED: (in_fp8 or bool(own)) and self.compiles_otherwise,
            ArmName.BF16_COMPILED: in_fp8 or not compiled or bool(own) or self.compiles_otherwise,
            ArmName.BF16: in_fp8 or compiled or bool(own),
        }
        ordered = sorted(forms, key=lambda form: not compiled and form != ArmName.BF16)
        plans = [replace(self.bf16(form), treatments=own) for form in ordered if forms[form]]
        if in_fp8 or own:
            plans[0] = replace(plans[0], place=Place.OWN_BF16)
        return plans

    @functools.cached_property
    def modelled(self) -> ModelledStep | None:
        """The step in compiled BF16, by the cost model."""
        return if_recorded(modelled_step, in_bf16(with_linears_compiled(self.facts, yes=True)))

    @property
    def waits_for_host(self) -> bool:
        return self.modelled is not None and self.modelled.host_ms >= HOST_PACED * self.modelled.busy_ms

    def whole(self, base: VariantPlan, shared: Layers) -> list[VariantPlan]:
        """Plan BF16, and FP8 on top of ``base``, as one graph, if the host is expected to set the pace.

        Of three such steps BF16 in one graph was 1.01x, 1.27x and 1.45x as fast as by block (H200).
        """
        is_one = own_compile(self.facts) == "whole" and not replace(self, treatments=base.treatments).compiles
        if is_one or not self.facts.network.blocks or not self.waits_for_host:
            return []
        plans = [replace(self.bf16(ArmName.BF16_WHOLE), treatments=self.own_autocast)]
        if shared:
            plans.append(self.on(plans[0], shared, bf16_with([*shared][-1])))
        if base.fp8 and COMPILE_MODEL not in base.treatments:
            plans.append(replace(self.on(base, {COMPILE_MODEL: ()}, COMPILE_MODEL), explored=True))
        return [replace(each, if_host_waits=True, place=Place.OTHER_BF16) for each in plans]

    def conversions(self, as_is: VariantPlan, shared: Layers) -> list[VariantPlan]:
        """Convert a model without FP8 by each recipe by block, then by each as the user compiles it.

        All have the ``shared`` proposals: fp32 adapters took 29 of FP8's 129 ms. One graph of FP8 compiles
        for 7 s a block, so that form comes after other recipes: these are 6% apart, forms 1% (H200).
        """
        compilation = COMPILE_BLOCKS if self.facts.network.blocks else COMPILE_MODEL
        bare, plans = replace(as_is, make=without_compile_marks), list[VariantPlan]()
        for recipe in (each.name for each in RECIPES.values() if each.converts):
            treatments: Layers = {**shared, **dict.fromkeys((*self.own_autocast, f"convert-{recipe}"), ())}
            forms = [self.on(bare, {**treatments, compilation: ()}, conversion_to(recipe))]
            if self.compiles_otherwise:
                forms.append(self.on(as_is, treatments, conversion_to(recipe, as_compiled=True)))
            plans += [replace(each, fp8=True, compiled=True) for each in forms]
        plans.sort(key=lambda each: not each.by_block)
        return [replace(plans[0], place=Place.PLAN), *plans[1:]]

    def bf16_alike(self, prescribed: VariantPlan, proposals: Layers) -> list[VariantPlan]:
        """Plan BF16 with those proposals that help it too, if there are any."""
        shared = {name: layers for name, layers in proposals.items() if traits(name).helps_bf16_too}
        if not shared:
            return []
        off = bf16_with(CHECKPOINTING_OFF) if CHECKPOINTING_OFF in shared else ArmName.BF16_PRESCRIBED
        name = BF16_WITH.get(frozenset(shared), off)
        return [replace(self.on(self.bf16_under(prescribed), shared, name), place=Place.PLAN)]

    def bf16_under(self, plan: VariantPlan) -> VariantPlan:
        """Plan BF16 compiled as this variant is."""
        under = replace(self, treatments=plan.treatments)
        if not under.compiled:
            return self.bf16(ArmName.BF16)
        own = self.compiles_otherwise and not under.compiles
        return self.bf16(ArmName.BF16_AS_COMPILED if own else ArmName.BF16_COMPILED)

    def tried_unasked(
        self, base: VariantPlan, proposals: Layers, alike: Sequence[VariantPlan]
    ) -> Iterator[VariantPlan]:
        """Plan the explorations on top of ``base``, after BF16 with the same if it helps BF16 too.

        Recipes are on top of compiled blocks where those are tried: one graph compiles five times as long.
        """
        under, blocks = replace(self, treatments=proposals), base
        for name, is_sensible in WORTH_A_TRY.items():
            sensible = name not in under.treatments and if_recorded(is_sensible, under)
            if not sensible or (treatment := describe(name, self.facts)) is None:
                continue
            change: Layers = {name: treatment.layers}
            below = blocks if family(name) == "recipe" else base
            plan = replace(self.on(below, change, name), explored=True)
            place = PLACES.get(name, Place.REST) if below.place.decides else Place.REST
            if name == COMPILE_BLOCKS:
                place = Place.REST if self.compiles_otherwise else Place.OTHER_BF16
                blocks = replace(plan, place=place)
            if uses_fp8(self.facts) and traits(name).helps_bf16_too and name not in self.own_autocast:
                in_bf16_too = alike[0] if alike else self.bf16_under(base)
                changes = (*in_bf16_too.treatments, name)
                twin = self.on(in_bf16_too, change, BF16_WITH.get(frozenset(changes)) or bf16_with(name))
                yield replace(twin, treatments=changes, explored=True, place=place)
            yield replace(plan, place=place)


def checkpoints(of: VariantPlanner) -> bool:
    """Return whether checkpointing is surely on, and can be switched off from outside."""
    return any(
        each.active is True and each.form in ("wrapper", "huggingface")
        for each in of.facts.get("training.checkpointing", ())
    )


def optimizer_takes_long(of: VariantPlanner) -> bool:
    """Return whether fusing the optimizer may gain 2%: not fused, it moves about three times the bytes."""
    step = of.modelled
    takes_long = step is None or of.waits_for_host or step.families_ms["optimizer"] > 0.01 * step.busy_ms
    return takes_long and could_be_fused(of.job)


def in_fp32(of: VariantPlanner) -> bool:
    """Return whether the parameters are fp32 and no autocast is on."""
    return of.facts.training.autocast is None and mostly_fp32(of.job.model)


def opens_no_autocast(of: VariantPlanner) -> bool:
    """Return whether layers of Transformer Engine run without FP8, in a model file without a training step.

    No finding says so: who trains it may open the autocast. An encoder took 154.3 ms, inside 106.9 (H200).
    """
    unknown = of.job.training_step is None and not recorded(of.facts, "training.fp8_autocast")
    own = (stack_of(each).under_autocast and each.get("engaged") is None for each in of.in_fp8)
    return unknown and bool(of.in_fp8) and all(own)


def other_recipe(of: VariantPlanner, name: str) -> bool:
    """Return whether a recipe is new to compiled Float8Linears or to Transformer Engine, and may run here."""
    recipe = BY_TREATMENT[name]
    if recipe.stack == TORCHAO.name:
        own = [each for each in of.in_fp8 if each.stack == "torchao" and each.kind.endswith(".Float8Linear")]
        takes = of.compiled and bool(own)
        known = {linear.recipe for linear in own}
    else:
        known = set(own_recipes(of.facts, opened=TE_AUTOCAST in of.treatments))
        takes = bool(known)
    return takes and recipe.name not in known and may_run(recipe, of.facts)


def blocks_may_gain(of: VariantPlanner) -> bool:
    """Return whether compiling block by block may gain without a finding; of a BF16 job it is a baseline.

    That is a job that the user compiles in another form, as BF16 is by block then too; or own blocks around
    eager layers of Transformer Engine (up to 1.22x; its own blocks 1.00x and 1.01x).
    """
    te_is_eager = any(
        stack_of(linear).own_kernels and linear.compiled is None and is_inside(linear, blocks)
        for blocks in of.facts.network.blocks
        if not blocks.kind.startswith("transformer_engine.")
        for linear in of.in_fp8
    )
    whole_step = any(each.form == "training_step" for each in of.facts.get("training.compile_marks", ()))
    otherwise = of.in_fp8 and of.facts.network.blocks and of.compiles_otherwise and not whole_step
    return not of.compiles and (te_is_eager or bool(otherwise))


def some_lose(of: VariantPlanner) -> bool:
    """Return whether some layers lose by the model, with compiled casts, but not all."""
    in_fp8 = of.in_fp8
    fused = of.compiled or all(stack_of(each).own_kernels for each in in_fp8)
    return fused and 0 < len(to_keep(of.facts)) < len(in_fp8)


WORTH_A_TRY: dict[str, Callable[[VariantPlanner], bool]] = {
    "cache-off": lambda of: (
        of.facts.get("training.use_cache") is True and COMPILE_BLOCKS not in of.treatments
    ),
    AUTOCAST_BF16: in_fp32,
    CHECKPOINTING_OFF: checkpoints,
    KEEP_IN_BF16: some_lose,
    COMPILE_BLOCKS: blocks_may_gain,
    **{name: functools.partial(other_recipe, name=name) for name in BY_TREATMENT if name in TREATMENTS},
}
"""Treatment -> whether to try it without a finding, in the order of what they save where they gain."""

PLACES = {CHECKPOINTING_OFF: Place.NO_CHECKPOINTING, **dict.fromkeys(FASTEST, Place.PLAN)}
"""Exploration on top of the plan -> its place, if it is not tried last."""


def plan_variants(facts: Facts, prescription: Sequence[Step], job: Job) -> list[VariantPlan]:
    """Plan the variants for these facts, those that decide first."""
    planner = VariantPlanner(facts, job)
    proposals = {
        each.name: each.layers
        for each in known(step.treatment for step in prescription)
        if not traits(each.name).is_an_arm_already
    }
    if opens_no_autocast(planner):
        proposals = {TE_AUTOCAST: (), **proposals}
    if optimizer_takes_long(planner):
        proposals["fused-optimizer"] = ()
    in_fp8 = uses_fp8(facts)
    if facts.get("network.fp8_calls") and not in_fp8:
        return [VariantPlan(ArmName.AS_IS, as_it_is)]  # nothing can take functions out of a forward
    as_is = VariantPlan(ArmName.AS_IS, as_it_is, fp8=in_fp8, place=Place.AS_IS)
    base, alike, converted = as_is, list[VariantPlan](), list[VariantPlan]()
    helping = (name for name in proposals if traits(name).helps_bf16_too)
    needless = {CHECKPOINTING_OFF, *planner.own_autocast}  # the first takes more memory
    shared = {name: proposals[name] for name in helping if name not in needless}
    if not in_fp8:
        converted = planner.conversions(as_is, shared)
        alike = planner.bf16_alike(converted[0], shared)
        if CHECKPOINTING_OFF in proposals or checkpoints(planner):
            off: Layers = {**shared, CHECKPOINTING_OFF: ()}
            fp8 = planner.conversions(as_is, off)[0]
            both = (*planner.bf16_alike(fp8, off), replace(fp8, name=fp8.name + NO_CHECKPOINTING))
            alike += [replace(each, explored=True, place=Place.NO_CHECKPOINTING) for each in both]
    elif proposals:
        base = replace(planner.on(as_is, proposals, ArmName.PRESCRIBED), place=Place.PLAN)
        alike = planner.bf16_alike(base, proposals)
    baselines = planner.baselines(in_fp8)
    again = next((each for each in baselines if each.name == ArmName.BF16), as_is)
    found = [
        as_is,
        *baselines,
        *alike,
        *([] if base is as_is else [base]),
        *converted,
        replace(again, name=ArmName.SELF_CHECK, base=again.name, place=Place.OTHER_BF16),
        *planner.whole(base, shared),
        *(planner.on(as_is, {key: to}, key) for key, to in proposals.items() if base.treatments != (key,)),
        *planner.tried_unasked(base, proposals, alike),
    ]

    def late(of: VariantPlan) -> bool:
        return {Place.PLAN: of.name not in FASTEST, Place.OTHER_BF16: not of.compiled}.get(of.place, False)

    return sorted(found, key=lambda each: (each.place, late(each)))
