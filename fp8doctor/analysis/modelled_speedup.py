"""Speedup that the cost model expects of a step that was not timed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from fp8doctor.analysis.fp8_request import trains_in_16_bits, under_unsloth
from fp8doctor.analysis.known_form import engaged, in_known_form, with_seen_recompute
from fp8doctor.analysis.layer_gain import MANY_TOKENS, PAYS_FROM, is_given
from fp8doctor.analysis.layers import FP8_MULTIPLE, nothing_to_convert, would_be_converted
from fp8doctor.analysis.significance import EVEN
from fp8doctor.cost.cast_cost import capability_of
from fp8doctor.cost.layer import NoNumbers
from fp8doctor.cost.matmul_counts import rows_of
from fp8doctor.cost.step_cost import (
    UNCERTAINTY,
    ModelledStep,
    in_bf16,
    in_fp8,
    modelled_step,
    priced_step,
    with_linears_compiled,
    with_recipe,
    with_tokens,
)
from fp8doctor.facts import Facts, Family, Linear
from fp8doctor.finding import Saving
from fp8doctor.gpus import has_datasheet, modelled_gpu
from fp8doctor.recipes import BY_TREATMENT, RECIPES, TORCHAO, Recipe, recipe_of, runs_on, stack_of

OFF, OFF_FUSED, OFF_IN_BALANCE = 0.15, 0.11, 0.35
"""Margins within which a modelled speedup decides nothing: of jobs, of those with one scale per tensor whose
casts are compiled or Transformer Engine's, and of those in `fp8doctor.cost.step_cost.BALANCE`, whose
errors are the largest. Source:
the same table; nine in ten recordings keep the second (`research.benchmarks.test_estimates`)."""


GEMMS: tuple[Family, ...] = ("gemm_fp8", "gemm_16bit", "gemm_fp32")

AROUND: tuple[Family, ...] = ("norm", "pointwise", "loss")
"""What a model counts around the Linears: FP8 changes what adding a bias takes."""


def parts_of(fp8_ms: Mapping[Any, float], bf16_ms: Mapping[Any, float], idle_ms: float) -> dict[str, float]:
    """Name what FP8 takes longer, in ms, by the families of both steps."""

    def longer(*families: Family) -> float:
        return sum(fp8_ms.get(each, 0.0) - bf16_ms.get(each, 0.0) for each in families)

    around = longer(*AROUND)
    return {"GEMMs": longer(*GEMMS), "casts": longer("cast"), "norms and pointwise": around, "idle": idle_ms}


def _parts_of(fp8: ModelledStep, bf16: ModelledStep) -> dict[str, float]:
    return parts_of(fp8.families_ms, bf16.families_ms, fp8.idle_ms - bf16.idle_ms)


class ModelledSpeedup(Struct, frozen=True):
    """Time of the best BF16 / time in FP8."""

    as_is: float | None
    """None if the step as it is does something that the cost model does not know."""
    compiled: float
    """With everything compiled. It equals ``as_is`` where an FP8 layer is not torchao's, because the model
    has no compiled form of it."""
    bf16: ModelledStep
    """The best BF16."""
    may_be_off: float = OFF
    """Margin around 1 within which `best` decides nothing."""
    as_is_may_be_off: float = OFF
    after: str = ""
    """What has to be done first, in words, if the step as it is was not modelled."""
    recipes: dict[str, float] = {}
    """Of a model without FP8: every recipe to convert it with -> its speedup, the fastest first."""
    bf16_now: float | None = None
    """Of a model without FP8: time of the best BF16 / time of the step as it is; None if it is unknown."""

    parts_ms: dict[str, float] = {}
    """What FP8 takes longer by parts, as it is, or its best form if that was not modelled."""
    modelled_ms: float | None = None
    """The step as it is by the model, with the watched step's communication; None if no step was watched."""
    shared_ms: float = 0.0
    """Communication and waits for a late rank of the watched step, which every form has."""
    ran_ms: float | None = None
    """The watched step. If there is one, `as_is` is the best BF16 over it."""
    exposed_ms: float = 0.0
    """Its exposed communication, which BF16 may cover because it computes longer."""
    ran_idle_ms: float = 0.0
    """How long its GPU was idle, as profiled."""

    @property
    def gpu(self) -> str:
        return self.bf16.gpu

    @property
    def bf16_ms(self) -> float:
        """The best BF16 step. One that ran faster than its model is the best."""
        modelled_ms = self.bf16.step_ms + self.shared_ms
        return min(modelled_ms, self.ran_ms) if self.recipes and self.ran_ms else modelled_ms

    @property
    def fp8_ms(self) -> float:
        ran = self.ran_ms if self.as_is and not self.recipes else None
        return ran or self.bf16_ms / (self.as_is or self.best)

    @property
    def now(self) -> float | None:
        """Time of the best BF16 / time of the step as it is, in FP8 or in BF16; None if it is unknown."""
        if self.as_is is None and not self.recipes and self.ran_ms:
            return self.bf16_ms / self.ran_ms
        return self.bf16_now if self.recipes else self.as_is

    @property
    def best(self) -> float:
        """Of the faster form."""
        return max(self.as_is or 0.0, self.compiled)

    @property
    def wins(self) -> bool:
        return self.best_bounds[0] >= 1

    @property
    def loses(self) -> bool:
        return self.best_bounds[1] <= 1

    @property
    def left_out_ms(self) -> float:
        """Time of the watched step that the model does not explain, and that any other form may have too.

        Of a step that is not modelled as it is, only idle time.
        """
        if not self.ran_ms:
            return 0.0
        best_ms = self.bf16_ms / self.best
        left_ms = self.ran_ms - (self.modelled_ms or max(best_ms, self.ran_ms - self.ran_idle_ms))
        return left_ms if left_ms >= EVEN * self.ran_ms else 0.0

    @property
    def best_bounds(self) -> tuple[float, float]:
        """Bound `best` by the model's error and the watched step."""
        return self._bounds(self.best, self.may_be_off)

    @property
    def now_bounds(self) -> tuple[float, float] | None:
        """Bound `now`; None if it is unknown."""
        return self._bounds(self.now, self.as_is_may_be_off) if self.now else None

    def _bounds(self, speedup: float, off: float) -> tuple[float, float]:
        """Bound a speedup. BF16 may lack, or have too, the time that the model left out of a watched step.

        It may also cover that step's communication. Another form of FP8 may have that time like BF16.
        """
        both = covered = 0.0
        if self.ran_ms and speedup == self.now:
            both = 1 - self.modelled_ms / self.ran_ms if self.modelled_ms else self.left_out_ms / self.ran_ms
            covered = self.exposed_ms / self.ran_ms
        low, high = (speedup + min(0.0, both) - covered) / (1 + off), (speedup + max(0.0, both)) / (1 - off)
        if speedup != self.now and (left_ms := self.left_out_ms):
            low = (self.bf16_ms + left_ms) / (self.bf16_ms / low + left_ms)
        return low, high


FIXED, CACHE_OFF, ONLY_COMPILED, BY_UNSLOTH = (
    "once it is fixed",
    "without a KV cache",
    "once it is compiled",
    "if Unsloth compiles its blocks",
)
"""What is modelled in place of a step as it is that the cost model does not know."""


def modelled_speedup(facts: Facts, *, fixed: bool = False) -> ModelledSpeedup | None:
    """Model the speedup; None if the cost model has no numbers for a part of the step.

    If findings say that the step is not what it seems, only the step that is ``fixed`` can be modelled.
    """
    facts, known = in_known_form(facts)
    facts, after = with_seen_recompute(engaged(facts) if fixed else facts), FIXED if fixed else known
    in_fp8 = facts.network.fp8
    if facts.get("training.use_cache") and any(each.compiled is not None for each in in_fp8):
        after = after or CACHE_OFF
    if may_be_compiled_by_unsloth(facts):
        after = after or BY_UNSLOTH
    fuses = all(stack_of(linear).fuses_casts for linear in in_fp8)
    per_tensor = all(recipe_of(linear).granularity == "tensor" for linear in in_fp8)
    as_is = None if after else modelled_step(facts)
    faster = modelled_step(with_linears_compiled(facts, yes=True) if fuses else facts)
    best = modelled_bf16(facts)
    if faster is None or best is None or not faster.step_ms:
        return None
    quicker = as_is if as_is and as_is.step_ms <= faster.step_ms else faster
    off = _may_be_off(quicker, best, fused=per_tensor)
    return ModelledSpeedup(
        as_is=best.step_ms / as_is.step_ms if as_is else None,
        compiled=best.step_ms / faster.step_ms,
        bf16=best,
        may_be_off=off,
        as_is_may_be_off=off if quicker is as_is else max(off, OFF),
        after="" if as_is else after or ONLY_COMPILED,
        parts_ms=_parts_of(as_is or quicker, best),
    )


TAKES_NONE = "a conversion to FP8 takes none of its layers"


def why_not_modelled(facts: Facts) -> str:
    """Say which part of a step, or of its conversion, the cost model has no numbers for."""
    gpu = modelled_gpu(facts)
    if gpu is None or not has_datasheet(facts):
        return "fp8doctor has no datasheet of this GPU"
    if gpu.fp8_tflops is None:
        return f"{gpu.name} has no FP8 tensor cores"
    if trains_in_16_bits(facts) and not facts.network.fp8:
        return "Unsloth has no FP8 training for LoRA"
    if nothing_to_convert(facts.network):
        return TAKES_NONE
    known = with_seen_recompute(in_known_form(facts)[0])
    plain = with_linears_compiled(in_bf16(known), yes=True)
    converted = known if known.network.fp8 else in_fp8(known, to_convert(known))
    fuses = all(stack_of(linear).fuses_casts for linear in converted.network.fp8)
    fp8 = with_linears_compiled(converted, yes=True) if fuses else converted
    try:
        for step in (fp8, plain):
            priced_step(step, gpu)
    except NoNumbers as missing:
        return str(missing)
    return TAKES_NONE


def may_be_compiled_by_unsloth(facts: Facts) -> bool:
    """Return whether FP8 layers that nothing else compiles may be, which decides their speed."""
    own = (each for each in facts.network.fp8 if stack_of(each).fuses_casts and each.compiled is None)
    return under_unsloth(facts) and any(own)


def modelled_conversion(facts: Facts) -> ModelledSpeedup | None:
    """Model a BF16 model converted by torchao's best recipe, compiled; None if unknown.

    The plan that converts it switches a KV cache off, so none is modelled.
    """
    facts, after = in_known_form(facts)
    facts = with_seen_recompute(facts)
    gpu = modelled_gpu(facts) if has_datasheet(facts) else None
    layers = to_convert(facts)
    best = modelled_bf16(facts) if gpu else None
    if gpu is None or best is None or not layers or trains_in_16_bits(facts):
        return None
    found = []
    for recipe in RECIPES.values():
        if recipe.stack != TORCHAO.name or not recipe.converts or not runs_on(recipe, capability_of(gpu)):
            continue
        step = modelled_step(with_linears_compiled(in_fp8(facts, layers, recipe.name), yes=True))
        if step is not None and step.step_ms:
            found.append((step, recipe))
    if not found:
        return None
    found.sort(key=lambda each: each[0].step_ms)
    (step, first), speedups = found[0], {each.name: best.step_ms / step.step_ms for step, each in found}
    off = _may_be_off(step, best, fused=first.granularity == "tensor")
    best_of_all = speedups[first.name]
    now = None if after else modelled_step(facts)
    bf16_now = best.step_ms / now.step_ms if now else None
    parts_ms = _parts_of(step, best)
    return ModelledSpeedup(best_of_all, best_of_all, best, off, off, after, speedups, bf16_now, parts_ms)


def modelled_bf16(facts: Facts) -> ModelledStep | None:
    plain = in_bf16(facts)
    forms = ((yes, modelled_step(with_linears_compiled(plain, yes=yes))) for yes in (False, True))
    baselines = [replace(each, compiled=yes) for yes, each in forms if each is not None]
    return min(baselines, key=lambda each: each.step_ms, default=None)


class HostBound(NamedTuple):
    """A modelled Transformer Engine step whose launches take longer than its kernels."""

    step: ModelledStep
    bf16_ms: float
    speedup: float
    pays_from: int | None
    """Tokens of a micro-batch from which FP8 pays; None if it does with none up to `MANY_TOKENS`."""


def modelled_host_bound(facts: Facts) -> HostBound | None:
    """Model a step that is slower than BF16 because of its host, by more than the model's error.

    None also for layers that no host of theirs launches, and for a batch that is not the user's.
    """
    fp8 = facts.network.fp8
    if not fp8 or not all(stack_of(linear).own_kernels for linear in fp8) or not is_given(facts):
        return None
    step, found = modelled_step(facts), modelled_speedup(facts)
    bf16 = modelled_step(with_linears_compiled(in_bf16(facts), yes=True))
    if step is None or bf16 is None or found is None or found.as_is is None:
        return None
    least = 1 + UNCERTAINTY
    if step.host_ms < step.busy_ms * least or found.as_is * least > 1:
        return None
    pays, tokens = None, 2 * (facts.workload.tokens or MANY_TOKENS)
    while pays is None and tokens <= MANY_TOKENS:
        then = modelled_speedup(with_tokens(facts, tokens))
        pays = tokens if then and then.as_is and then.as_is >= PAYS_FROM else None
        tokens *= 2
    return HostBound(step, bf16.step_ms, found.as_is, pays)


class FasterRecipe(NamedTuple):
    """Another recipe of the job's stack, and the modelled steps with the job's own and with it."""

    recipe: Recipe
    now_ms: float
    then_ms: float
    gpu: str

    @property
    def saving(self) -> Saving:
        low, high = (self.now_ms - self.then_ms * (1 + off) for off in (OFF, -OFF))
        return Saving(low=low, high=high, basis="modelled", gpu=self.gpu)


def faster_recipe(facts: Facts) -> FasterRecipe | None:
    """Return the fastest recipe, if it is faster than the job's by more than the model's error."""
    now, gpu = modelled_speedup(facts), modelled_gpu(facts)
    if now is None or not now.as_is or gpu is None or not is_given(facts):
        return None
    mine, best, speedup = recipe_of(facts.network.fp8[0]), None, (1 + OFF) * now.as_is
    for each in BY_TREATMENT.values():
        if each.stack == mine.stack and each.name != mine.name and runs_on(each, capability_of(gpu)):
            then = modelled_speedup(with_recipe(facts, each.name))
            if then and then.as_is and then.as_is > speedup:
                best, speedup = each, then.as_is
    if best is None:
        return None
    return FasterRecipe(best, now.bf16_ms / now.as_is, now.bf16_ms / speedup, gpu.name)


def _may_be_off(*steps: ModelledStep, fused: bool) -> float:
    return OFF_IN_BALANCE if any(each.in_balance for each in steps) else OFF_FUSED if fused else OFF


def to_convert(facts: Facts) -> list[Linear]:
    """List the BF16 layers that a conversion takes and an FP8 matmul can multiply."""
    return [
        linear
        for linear in facts.network.linears
        if would_be_converted(linear) and (rows := rows_of(linear, facts)) and rows % FP8_MULTIPLE == 0
    ]
