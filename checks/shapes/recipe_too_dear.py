"""Another FP8 recipe is faster here

What it finds. The same step is faster with another of torchao's or Transformer Engine's recipes.

Why it matters. Recipes differ in casts and kernels. `tensorwise` has one scale per tensor, which the fastest
FP8 kernels use. `rowwise` has one per row and column. Its casts cost more and its matmuls are slower, which
small layers (K, N up to about 2048) never earn back. `rowwise_with_gw_hp` keeps the weight gradient in BF16.
In Transformer Engine, delayed scaling knows its scales in advance, current scaling reads every tensor once
more, and block scaling works in blocks of 128. On an H200, a 468M decoder took 92.8 ms/step with tensorwise
and 126.0 ms with rowwise (BF16: 98.2 ms).

Fix. Convert with the faster recipe and watch the loss: `tensorwise` is the fastest and least exact,
`rowwise_with_gw_hp` the most exact. For Transformer Engine, pass the recipe to `te.autocast`.

    config = Float8LinearConfig.from_recipe_name("rowwise")     # before

    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    config = Float8LinearConfig.from_recipe_name("tensorwise")  # after
    convert_to_float8_training(model, config=config)

When to ignore it. If your loss needs the more exact recipe.

How it is detected, and limits. The trial times the step with each other recipe, all else equal. Without a
trial, two things are information. The cost model expects tensorwise to be 15% faster with your batch. Or the
GPU (GeForce Blackwell) multiplies block-scaled FP8 at twice the rate of plain FP8. For that, torchao 0.18 and
Transformer Engine 2.20 have no training recipe.

References. `h200-decoder_468m_compiled`. NVIDIA's 5B on an H200 NVL, matmuls and casts alone: 1.69x of BF16
with delayed, 1.58x with current, 1.40x with block scaling. FP8 rates on 12.x:
https://github.com/triton-lang/triton/issues/11320 https://github.com/Nerogar/OneTrainer/pull/1686
https://docs.pytorch.org/ao/main/workflows/training.html
"""

from __future__ import annotations

from fp8doctor.analysis.arms import arm, base_of, measured_saving, ratio, timed_on_cpu
from fp8doctor.analysis.losing_layers import is_given
from fp8doctor.analysis.noise import script_interval
from fp8doctor.analysis.significance import EVEN
from fp8doctor.analysis.treatment_table import COMPILE_BLOCKS, recipe_after, recipe_change
from fp8doctor.cost import modelled_gpu
from fp8doctor.cost.step_cost import modelled_step, with_recipe
from fp8doctor.diagnosis.treatments import describe
from fp8doctor.facts import Arm, ArmName, Facts, Value, if_recorded, recorded
from fp8doctor.facts.examples import example, float8, variant
from fp8doctor.facts.no_number import sentence_of
from fp8doctor.finding import Finding, NotApplicable
from fp8doctor.recipes import BY_TREATMENT, named
from fp8doctor.registry import check
from fp8doctor.wording import times

TENSORWISE = "tensorwise"

MODEL_ERROR = 0.15
"""Share by which another recipe must be faster if both are modelled. A convention."""


@check(
    "SHP005", "recipe-too-dear", area="shapes", severity="warning", changes_fp8=True, explained_by=("DST001",)
)
def recipe_too_dear(facts: Facts) -> Finding | NotApplicable | None:
    own = sorted({linear.recipe or "unknown" for linear in facts.network.fp8})
    if not own:
        return NotApplicable(reason="no layer is set up for FP8 training")
    on_cpu = timed_on_cpu(facts)
    slow = (
        (at_half_rate(own, facts) or if_recorded(modelled, own, facts))
        if on_cpu or not recorded(facts, "trial.arms")
        else None
    )
    if slow:
        return slow
    if on_cpu:
        return NotApplicable(reason="the trial timed no other recipe on a GPU")
    others = [
        (each, base)
        for each in facts.trial.arms
        if _is_recipe(each) and each.tried and (base := base_of(facts.trial, each))
    ]
    if not others:
        reasons = sorted(
            {reason for each in facts.trial.arms if _is_recipe(each) and (reason := sentence_of(each))}
        )
        return NotApplicable(reason=f"no other recipe was timed{': ' if reasons else ''}{'; '.join(reasons)}")
    gains = [(base, each, ratio(base, each)) for each, base in others]
    faster = [
        (base, each, gain)
        for base, each, gain in gains
        if gain.low > 1 and gain.median - 1 > EVEN and pays_by_block(facts, base, each)
        if _beyond_noise(base, each, facts)
    ]
    if not faster:
        return None
    base, best, gain = max(faster, key=lambda each: each[2].median)
    recipe = _recipe(best)
    evidence: dict[str, Value | tuple[Value, ...]] = {
        "own_recipe": tuple(own),
        "faster_recipe": recipe,
        "of_arm": base.name,
        "base_step_ms": base.step_ms,
    }
    evidence |= {f"{_recipe(each)}_step_ms": each.step_ms for each, _ in others}
    evidence |= {"speedup": gain.median, "speedup_low": gain.low, "speedup_high": gain.high}
    return Finding(
        title=f"The recipe {recipe} is {times(base.step_ms, best.step_ms)} as fast as {', '.join(own)}",
        explanation=f"Timed in turn, the step takes {best.step_ms:,.1f} instead of {base.step_ms:,.1f} "
        f"ms{', both compiled block by block' if base.name == COMPILE_BLOCKS else ''}. The recipes also "
        "differ in exactness: watch the loss.",
        evidence=evidence,
        saving_ms=measured_saving(facts.trial, base, best),
        treatment=describe(best.name, facts),
    )


def _beyond_noise(base: Arm, other: Arm, facts: Facts) -> bool:
    """Return whether the interval of a script with the other recipe leaves out the step of today."""
    shown = script_interval(other, facts.trial)
    return shown is None or base.step_ms is None or shown.high < base.step_ms


def at_half_rate(own: list[str], facts: Facts) -> Finding | None:
    """Report plain FP8 on a GPU whose datasheet has a higher rate for block-scaled FP8."""
    gpu = modelled_gpu(facts)
    if (
        gpu is None
        or not gpu.block_scaled_fp8_tflops
        or not gpu.fp8_tflops
        or not all(named(each).granularity in ("tensor", "row") for each in own)
    ):
        return None
    times = gpu.block_scaled_fp8_tflops / gpu.fp8_tflops
    return Finding(
        severity="info",
        title=f"{gpu.name} multiplies block-scaled FP8 (MXFP8) {times:.1f} times as fast as {', '.join(own)}",
        explanation=f"Datasheet: {gpu.block_scaled_fp8_tflops:,.0f} TFLOP/s against {gpu.fp8_tflops:,.0f}, "
        f"and {gpu.bf16_tflops:,.0f} in BF16; nothing was timed. torchao 0.18 and Transformer Engine 2.20 "
        "do not train in MXFP8 on this GPU. Your own kernel could use the rate with all block scales set "
        "to 1.",
        evidence={
            "own_recipe": tuple(own),
            "gpu": gpu.name,
            "fp8_tflops": gpu.fp8_tflops,
            "block_scaled_fp8_tflops": gpu.block_scaled_fp8_tflops,
        },
    )


def modelled(own: list[str], facts: Facts) -> Finding | None:
    """Report that tensorwise is modelled as faster by more than the model's error, for unwatched steps."""
    watched = facts.get("observed.steps_ms")
    if watched or not is_given(facts) or own not in (["rowwise"], ["rowwise_with_gw_hp"]):
        return None
    step, other = modelled_step(facts), modelled_step(with_recipe(facts, TENSORWISE))
    if step is None or other is None or step.step_ms / other.step_ms - 1 <= MODEL_ERROR:
        return None
    return Finding(
        severity="info",
        title=f"The recipe {TENSORWISE} may be about {step.step_ms / other.step_ms:.2f}x as fast as {own[0]}",
        explanation=f"The step would take {other.step_ms:,.1f} instead of {step.step_ms:,.1f} ms (estimated "
        f"for {step.gpu}; nothing was timed). The recipes also differ in exactness: watch the loss.",
        evidence={
            "own_recipe": tuple(own),
            "faster_recipe": TENSORWISE,
            "modelled_step_ms": step.step_ms,
            "modelled_faster_step_ms": other.step_ms,
            "gpu": step.gpu,
        },
    )


def pays_by_block(facts: Facts, base: Arm, changed: Arm) -> bool:
    """Whether a variant compiled block by block also beats the user's single graph."""
    as_is = arm(facts.trial, ArmName.AS_IS)
    return base.name != COMPILE_BLOCKS or as_is is None or ratio(as_is, changed).low > 1


def _is_recipe(timed: Arm) -> bool:
    return timed.name in BY_TREATMENT


def _recipe(timed: Arm) -> str:
    """Name the recipe as `Linear.recipe` does."""
    if timed.name in BY_TREATMENT:
        return BY_TREATMENT[timed.name].name
    return recipe_after(timed.name)


def _compiled(own: str, **step_ms: float) -> Facts:
    """Compiled decoders as measured on an H200, in ms; the model's own recipe is the step as it is."""
    others = [
        variant(recipe_change(recipe), ms, base=ArmName.AS_IS)
        for recipe, ms in step_ms.items()
        if recipe != own
    ]
    arms = (variant(ArmName.AS_IS, step_ms[own]), *others)
    return example(linears=(float8(recipe=own),), device="cuda", gpu="NVIDIA H200", arms=arms)


FIRES = _compiled("rowwise", tensorwise=88.31, rowwise=122.57, rowwise_with_gw_hp=94.21)
SILENT = _compiled("tensorwise", tensorwise=71.55, rowwise=85.76, rowwise_with_gw_hp=83.57)
