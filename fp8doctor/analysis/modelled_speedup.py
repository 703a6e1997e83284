"""Speedup that the cost model expects of a step that was not timed."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from fp8doctor.analysis.fp8_request import trains_in_16_bits, under_unsloth
from fp8doctor.analysis.layers import nothing_to_convert, to_convert
from fp8doctor.analysis.significance import EVEN, Number, holding
from fp8doctor.analysis.watched import Run
from fp8doctor.cost.matmuls import NoNumbers, all_tokens, unseen_recompute
from fp8doctor.cost.step_cost import (
    UNCERTAINTY,
    ModelledStep,
    in_bf16,
    in_fp8,
    known_gpu,
    modelled_step,
    priced_step,
    with_linears,
    with_linears_compiled,
)
from fp8doctor.facts import Facts, Family, Linear, recorded
from fp8doctor.gpus import GpuSpec, modelled_gpu
from fp8doctor.recipes import RECIPES, TORCHAO, Recipe, of_stack, recipe_of, runs_on, stack_of

OFF, OFF_FUSED, OFF_IN_BALANCE = 0.15, 0.11, 0.35
"""Margins within which a modelled speedup decides nothing: of jobs, of those with one scale per tensor whose
casts are compiled or Transformer Engine's, and of those in `fp8doctor.cost.step_cost.BALANCE`, whose
errors are the largest. Source:
the same table; nine in ten recordings keep the second (`research.benchmarks.test_estimates`)."""

UNCHECKED = 0.25
"""Share for what was compared with nothing. A convention."""

OFF_ON = {
    ("torchao", "tensor", "Hopper"): 0.12,
    ("torchao", "row", "Hopper"): 0.15,
    ("transformer_engine", "tensor", "Hopper"): 0.11,
    ("transformer_engine", "block", "Hopper"): 0.15,
    ("transformer_engine", "tensor", "Blackwell"): 0.16,
    ("transformer_engine", "tensor", "Ada"): 0.15,
}
"""Stack, elements of a scale, GPUs -> share that an estimate may be off.

Hopper: nothing that was published or recorded is further off, but for jobs whose attention is of 2023
(tests/benchmarks/results/published.md and cost_model_h200.md). Blackwell and Ada have jobs of one source
each, which are 5% off at the most: three times that."""

PARTS: dict[str, tuple[Family, ...]] = {
    "GEMMs": ("gemm_fp8", "gemm_16bit", "gemm_fp32"),
    "casts": ("cast",),
    "norms and pointwise": ("norm", "pointwise", "loss"),
}
"""Parts that FP8 changes -> families. Adding a bias belongs to what the model counts around the Linears."""

IN_KNOWN_FORM, UNDER_AUTOCAST = "with layers that the cost model knows", "under BF16 autocast"


def as_modelled(facts: Facts, *, fixed: bool = False) -> tuple[Facts, str]:
    """Replace what the cost model has no numbers for by what its fix puts there, and say so if anything is.

    FP8 and BF16 get the same autocast. A forward that calls ``checkpoint`` recomputes every layer below it,
    but no head: which of them it does is not known without a run. Every FP8 layer of a ``fixed`` job runs.
    """
    gpu, module = modelled_gpu(facts), unseen_recompute(facts)
    linears = [_known(each, gpu) for each in facts.network.linears]
    after = IN_KNOWN_FORM if linears != list(facts.network.linears) else ""
    in_fp32 = any(each.multiplies_in == "float32" and each.adapter != "adapter" for each in linears)
    if in_fp32 and facts.get("training.autocast") != "bfloat16" and recorded(facts, "training"):
        facts, after = replace(facts, training=replace(facts.training, autocast="bfloat16")), UNDER_AUTOCAST
    for place, each in enumerate(linears):
        if fixed and each.use == "training":
            linears[place] = each = replace(each, engaged=None)
        if module is not None and not recorded(each, "checkpointed"):
            below = each.name.startswith(f"{module}." if module else "") and each.role != "head"
            linears[place] = replace(each, checkpointed=module if below else None)
    return with_linears(facts, linears), after


def _known(linear: Linear, gpu: GpuSpec | None) -> Linear:
    """Store its weights in BF16, or run it in a recipe that this GPU has, not emulated."""
    if linear.use == "storage":
        return replace(linear, use="none", stack="torch", dtype="bfloat16", features={})
    if linear.use != "training" or linear.stack != TORCHAO.name:
        return linear
    if linear.features.get("emulate"):
        linear = replace(linear, features={**linear.features, "emulate": False})
    own = linear.get("recipe") == "custom"
    lacks = own or (gpu is not None and not runs_on(recipe_of(linear), gpu.capability))
    return replace(linear, recipe="tensorwise") if lacks else linear


class Estimate(Struct, frozen=True):
    """The best BF16 / FP8 by the cost model, next to the watched step if there is one."""

    bf16: ModelledStep
    """The best BF16, without what only the watched step has."""
    bf16_ms: float
    """The best BF16 step; of a job in BF16 at most the watched one."""
    now: Number | None
    """The best BF16 / the step as it is, in FP8 or in BF16; None if the cost model does not know that."""
    best: Number
    """The best BF16 / the faster form of FP8, or the best conversion to it."""
    fp8_ms: float
    """The step in FP8 as it is, or its best form if that was not modelled."""
    parts_ms: dict[str, float]
    """What FP8 takes longer in that step, by parts."""
    after: str = ""
    """What has to be done first, in words, if the step as it is was not modelled."""
    recipes: tuple[str, ...] = ()
    """Of a job without FP8: every recipe to convert it with, the fastest first."""
    ran_ms: float | None = None
    """The watched step."""
    tokens: int = 0
    """Of the step; those of two steps differ if a fix changes the batch."""
    left_out_ms: float = 0.0
    """Time of the watched step that the model does not explain, and that any other form may have too."""

    @property
    def gpu(self) -> str:
        return self.bf16.gpu

    @property
    def wins(self) -> bool:
        return self.best.low >= 1

    @property
    def loses(self) -> bool:
        return self.best.high <= 1


FIXED, CACHE_OFF, ONLY_COMPILED, BY_UNSLOTH = (
    "once it is fixed",
    "without a KV cache",
    "once it is compiled",
    "if Unsloth compiles its blocks",
)
"""What is modelled in place of a step as it is that the cost model does not know."""

MORE = 0.01
"""Speedup that compiling everything gives beyond the watched step, from which it counts. A choice."""


def margin(recipe: Recipe, gpu: GpuSpec) -> float:
    """Return the share by which a modelled speedup may be off on this GPU."""
    return OFF_ON.get((recipe.stack, recipe.granularity, gpu_class(gpu)), UNCHECKED)


def gpu_class(gpu: GpuSpec) -> str:
    """Name the group of GPUs whose published speedups a range rests on."""
    return {"8": "Ada", "9": "Hopper", "10": "Blackwell"}.get(gpu.compute_capability.partition(".")[0], "RTX")


def modelled_speedup(
    facts: Facts, *, fixed: bool = False, run: Run | None = None, shared_ms: float = 0.0
) -> Estimate | None:
    """Estimate a job as `estimate` does; None if a part has no numbers."""
    try:
        return estimate(facts, fixed=fixed, run=run, shared_ms=shared_ms)
    except NoNumbers:
        return None


def estimate(
    facts: Facts, *, fixed: bool = False, run: Run | None = None, shared_ms: float = 0.0
) -> Estimate:
    """Estimate FP8 as it is and compiled, or the best conversion. Raises `NoNumbers`.

    If findings say that the step is not what it seems, only the step that is ``fixed`` can be modelled. With
    ``run`` the step as it is takes as long as it did, and every other has its communication too. A job that a
    fix made another one has no run, but ``shared_ms`` of communication.
    """
    facts, after = as_modelled(facts, fixed=fixed)
    in_fp8 = facts.network.fp8
    after = _what_comes_first(facts, after, fixed=fixed) if in_fp8 else after
    forms, bf16, now = _compiled_forms(facts), modelled_bf16(facts), None if after else modelled_step(facts)
    form, per_tensor = next(iter(forms.values()))
    shared_ms = run.shared_ms if run else shared_ms
    if run and now and not in_fp8:
        (bf16, form, now), shared_ms = _as_it_ran(run, now, (bf16, form, now))
    as_is = now if in_fp8 else None
    quicker = as_is if as_is and as_is.step_ms <= form.step_ms else form
    bf16_ms, best_ms = bf16.step_ms + shared_ms, quicker.step_ms + shared_ms
    now_ms, seen = now.step_ms + shared_ms if now else None, None
    if run:
        now_ms = run.ms
        if not in_fp8:
            bf16_ms = min(bf16_ms, now_ms)
        elif as_is:
            gain = bf16.step_ms / form.step_ms - bf16.step_ms / as_is.step_ms
            best_ms = min(form.step_ms + shared_ms, now_ms) if gain >= MORE else now_ms
        seen = _told_apart(run, as_is.step_ms + shared_ms if as_is else 0.0, best_ms)

    def bounded(ms: float, off: float) -> Number:
        if seen and ms == now_ms:
            return _bounded_as_watched(bf16_ms / ms, off, seen)
        found = holding(bf16_ms / ms, bf16_ms / ms / (1 + off), bf16_ms / ms / (1 - off), "modelled")
        low = found.low
        if seen:  # another form of FP8 may have what the model does not explain, like BF16
            low = (bf16_ms + seen.left_ms) / (bf16_ms / low + seen.left_ms)
            if seen.run.is_spread and not in_fp8:
                low = min(low, 1 - off)  # BF16 covers communication that a shorter step exposes
        return replace(found, low=low)

    off = _off(
        facts, next(iter(forms)), per_tensor=per_tensor, balanced=bf16.in_balance or quicker.in_balance
    )
    return Estimate(
        bf16=bf16,
        bf16_ms=bf16_ms,
        now=bounded(now_ms, off if not in_fp8 or quicker is as_is else max(off, OFF)) if now_ms else None,
        best=bounded(best_ms, off),
        fp8_ms=now_ms if as_is and now_ms else best_ms,
        parts_ms=_parts_ms(as_is or quicker, bf16, run, ran=as_is is not None),
        after=after if not in_fp8 else "" if as_is else after or ONLY_COMPILED,
        recipes=() if in_fp8 else tuple(forms),
        ran_ms=run.ms if run else None,
        tokens=all_tokens(facts),
        left_out_ms=seen.left_ms if seen else 0.0,
    )


def _what_comes_first(facts: Facts, after: str, *, fixed: bool) -> str:
    """Say what has to be done before FP8 as it is can be modelled; empty if it can."""
    if fixed or after:
        return FIXED if fixed else after
    if facts.get("training.use_cache") and any(each.compiled is not None for each in facts.network.fp8):
        return CACHE_OFF
    return BY_UNSLOTH if may_be_compiled_by_unsloth(facts) else ""


def _as_it_ran(
    run: Run, now: ModelledStep, forms: Iterable[ModelledStep]
) -> tuple[Iterable[ModelledStep], float]:
    """Correct every form by a watched BF16 step: what it has beyond its model, all have.

    If its model is too slow, that of every form is. Returns also what they share.
    """
    own_ms = run.ms - run.shared_ms
    by = own_ms / now.step_ms if 0 < own_ms < now.step_ms else 1.0
    return [each.scaled(by) for each in forms], max(run.shared_ms, run.ms - by * now.step_ms)


class Watched(NamedTuple):
    """A watched step next to its model, in ms."""

    run: Run
    modelled_ms: float
    """Its model, in FP8; 0 if that is not known."""
    left_ms: float
    """What the model does not explain, and any other form may have too."""


def _told_apart(run: Run, modelled_ms: float, best_ms: float) -> Watched:
    """Tell what the model of a watched step leaves out. Raises `NoNumbers` if it took less."""
    if modelled_ms > (1 + UNCERTAINTY) * run.ms:
        raise NoNumbers("the watched step takes less than the cost model allows it")
    left_ms = run.ms - (modelled_ms or max(best_ms, run.ms - run.idle_ms))
    return Watched(run, modelled_ms, left_ms if left_ms >= EVEN * run.ms else 0.0)


def _bounded_as_watched(speedup: float, off: float, seen: Watched) -> Number:
    """Bound the speedup of a watched step, whose BF16 may have, or lack, what its model left out.

    That time and communication were measured, so the model's error is not of them. BF16 may also cover the
    communication.
    """
    run, modelled_ms = seen.run, seen.modelled_ms
    both = 1 - modelled_ms / run.ms if modelled_ms else seen.left_ms / run.ms
    covered = run.exposed_ms / run.ms if modelled_ms else 0.0
    shared = run.shared_ms / run.ms
    low = (speedup + min(0.0, both) - covered) / (1 + off)
    high = (speedup - shared) / (1 - off) + shared + max(0.0, both)
    return holding(speedup, low, high, "modelled")


def _off(facts: Facts, recipe: str, *, per_tensor: bool, balanced: bool) -> float:
    """Return the share by which the speedup may be off: of the kind of job, and of its GPU."""
    off, fp8 = OFF_IN_BALANCE if balanced else OFF_FUSED if per_tensor else OFF, facts.network.fp8
    of = recipe_of(fp8[0]) if fp8 else RECIPES[TORCHAO.name, recipe]
    return off if gpu_class(known_gpu(facts)) == "Hopper" else max(off, margin(of, known_gpu(facts)))


def _parts_ms(fp8: ModelledStep, bf16: ModelledStep, run: Run | None, *, ran: bool) -> dict[str, float]:
    """Divide what FP8 takes longer; a watched step's parts are its own if ``ran`` says that it is in FP8."""
    families: Mapping[Any, float] = run.families_ms if run and ran and run.families_ms else fp8.families_ms
    idle_ms = 0.0 if run else fp8.idle_ms - bf16.idle_ms
    if run and families is run.families_ms:
        idle_ms = max(0.0, run.own_idle_ms - bf16.idle_ms)
    parts_ms = {
        part: sum(families.get(each, 0.0) - bf16.families_ms.get(each, 0.0) for each in of)
        for part, of in PARTS.items()
    }
    return parts_ms | {"idle": idle_ms}


TAKES_NONE = "a conversion to FP8 takes none of its layers"


def _compiled_forms(facts: Facts) -> dict[str, tuple[ModelledStep, bool]]:
    """Model FP8 compiled, and tell whether it has one scale per tensor; of a BF16 job by torchao's recipes.

    The plan that converts a job switches a KV cache off, so none is modelled. The fastest recipe is first.
    Raises `NoNumbers`.
    """
    gpu, fp8, reason = known_gpu(facts), facts.network.fp8, TAKES_NONE
    if gpu.fp8_tflops is None:
        raise NoNumbers(f"{gpu.name} has no FP8 tensor cores")
    if fp8:
        fuses = all(stack_of(linear).fuses_casts for linear in fp8)
        step = priced_step(with_linears_compiled(facts, yes=True) if fuses else facts)
        return {"": (step, all(recipe_of(linear).granularity == "tensor" for linear in fp8))}
    if trains_in_16_bits(facts):
        raise NoNumbers("Unsloth has no FP8 training for LoRA")
    layers, found = to_convert(facts), dict[str, tuple[ModelledStep, bool]]()
    for recipe in of_stack(TORCHAO.name) if layers else ():
        if recipe.converts and runs_on(recipe, gpu.capability):
            converted = with_linears_compiled(in_fp8(facts, layers, recipe.name), yes=True)
            try:
                found[recipe.name] = priced_step(converted), recipe.granularity == "tensor"
            except NoNumbers as missing:
                reason = str(missing)
    if not found:
        if not nothing_to_convert(facts.network):
            modelled_bf16(facts)  # raises if it is the rows that are unknown
        raise NoNumbers(reason)
    return dict(sorted(found.items(), key=lambda each: each[1][0].step_ms))


def may_be_compiled_by_unsloth(facts: Facts) -> bool:
    """Return whether FP8 layers that nothing else compiles may be, which decides their speed."""
    own = (each for each in facts.network.fp8 if stack_of(each).fuses_casts and each.compiled is None)
    return under_unsloth(facts) and any(own)


def modelled_bf16(facts: Facts) -> ModelledStep:
    """Model BF16 compiled, or not if that is faster. Raises `NoNumbers`."""
    eager, compiled = (priced_step(with_linears_compiled(in_bf16(facts), yes=yes)) for yes in (False, True))
    return min(eager, replace(compiled, compiled=True), key=lambda each: each.step_ms)
