"""Another FP8 recipe is faster here

Looks at: the step with each other recipe of torchao, or of Transformer Engine, in place of the
model's own, timed beside it with all else equal.

Why it costs time. The recipes differ in what surrounds the GEMMs. `tensorwise` needs one scale per
tensor, which the fastest FP8 kernels take. `rowwise` needs one per row and column: its casts cost
more and its GEMMs are slower, which small layers (K, N up to about 2048) never earn back.
`rowwise_with_gw_hp` leaves the weight gradient in BF16, so that it gains at two GEMMs only. Of
Transformer Engine's, delayed scaling knows its scales beforehand, current scaling reads every
tensor once more, and block scaling casts and multiplies in blocks of 128. Which one wins depends on
the shapes, so it is measured.

Without a trial two things are told, as information. With a batch of yours, that the cost model
expects another of torchao's recipes to be faster, by a margin of 15 %. And by the datasheet, that a
GeForce of the Blackwell generation multiplies block-scaled FP8 (MXFP8) at twice the rate of plain
FP8: neither torchao 0.18 nor Transformer Engine 2.20 trains in it there; a kernel that takes all
block scales as 1 gives the same product as plain FP8.

What to do. Convert with the recipe that is faster, and watch the loss: `tensorwise` is the fastest
and the least exact, `rowwise_with_gw_hp` the most exact. Transformer Engine is given its recipe by
the autocast: `te.autocast(enabled=True, recipe=Float8CurrentScaling())`.

    config = Float8LinearConfig.from_recipe_name("rowwise")       # before: 123 ms at width 1024
    config = Float8LinearConfig.from_recipe_name("tensorwise")    # after: 88 ms
    convert_to_float8_training(model, config=config)

Evidence: `h200-decoder_468m_compiled`: tensorwise 92.8 ms a step, rowwise 126.0 ms, BF16 98.2 ms.
Transformer Engine's documentation gives a 5B on an H200 NVL 1.69x of BF16 with delayed, 1.58x with
current, 1.40x with block scaling, GEMMs and casts alone. The two rates of FP8 on 12.x:
https://github.com/triton-lang/triton/issues/11320 https://github.com/Nerogar/OneTrainer/pull/1686
https://docs.pytorch.org/ao/main/workflows/training.html
"""

from __future__ import annotations

from fp8doctor.analysis.arms import arm, base_of, ratio, saved_ms, timed_on, timed_on_cpu
from fp8doctor.analysis.losing_layers import is_given
from fp8doctor.analysis.significance import EVEN
from fp8doctor.analysis.treatment_table import COMPILE_BLOCKS, recipe_after, recipe_change
from fp8doctor.cost import modelled_gpu
from fp8doctor.cost.step_cost import modelled_step, with_recipe
from fp8doctor.diagnosis.treatments import describe
from fp8doctor.facts import Arm, Facts, Linear, Network, Trial, if_recorded, recorded
from fp8doctor.facts.arm_names import ArmName, in_any_window
from fp8doctor.facts.record import Value
from fp8doctor.finding import Finding, NotApplicable, Saving
from fp8doctor.recipes import BY_TREATMENT, named
from fp8doctor.registry import check
from fp8doctor.wording import times

TENSORWISE = "tensorwise"

MODEL_ERROR = 0.15
"""Share by which another recipe has to be faster, where both are modelled. A convention of this tool."""


@check(
    "SHP005", "recipe-too-dear", area="shapes", severity="warning", changes_fp8=True, explained_by=("DST001",)
)
def recipe_too_dear(facts: Facts) -> Finding | NotApplicable | None:
    own = sorted({linear.recipe or "unknown" for linear in facts.network.linears if linear.use == "training"})
    if not own:
        return NotApplicable(reason="no layer is set up for FP8 training")
    on_cpu = timed_on_cpu(facts)
    slow = untimed(own, facts) if on_cpu or not recorded(facts, "trial.arms") else None
    if slow:
        return slow
    if on_cpu:
        return NotApplicable(reason="no other recipe was timed on a GPU")
    others = [
        (each, base)
        for each in facts.trial.arms
        if _is_recipe(each) and each.tried and (base := base_of(facts.trial, each))
    ]
    if not others:
        reasons = sorted({each.reason for each in facts.trial.arms if _is_recipe(each) and each.reason})
        return NotApplicable(reason=f"no other recipe was timed{': ' if reasons else ''}{'; '.join(reasons)}")
    gains = [(base, each, ratio(base, each)) for each, base in others]
    faster = [
        (base, each, gain)
        for base, each, gain in gains
        if gain.low > 1 and gain.median - 1 > EVEN and pays_by_block(facts, base, each)
    ]
    if not faster:
        return None
    base, best, gain = max(faster, key=lambda each: each[2].median)
    saved = saved_ms(base, best)
    recipe = _recipe(best)
    evidence: dict[str, Value | tuple[Value, ...]] = {
        "own_recipe": tuple(own),
        "faster_recipe": recipe,
        "of_arm": in_any_window(base.name),
        "base_step_ms": base.step_ms,
    }
    evidence |= {f"{_recipe(each)}_step_ms": each.step_ms for each, _ in others}
    evidence |= {"speedup": gain.median, "speedup_low": gain.low, "speedup_high": gain.high}
    return Finding(
        title=f"The recipe {recipe} is {times(base.step_ms, best.step_ms)} as fast as {', '.join(own)}",
        explanation=(
            f"The step takes {best.step_ms:,.1f} instead of {base.step_ms:,.1f} ms, timed in turn"
            f"{', both compiled block by block' if base.name == COMPILE_BLOCKS else ''}. "
            + "The recipes differ in exactness too: watch the loss."
        ),
        evidence=evidence,
        saving_ms=Saving(
            low=saved.low,
            high=saved.high,
            basis="measured",
            gpu=timed_on(facts.trial),
        ),
        treatment=describe(best.name, facts),
    )


def untimed(own: list[str], facts: Facts) -> Finding | None:
    """Tell what is known without a trial."""
    return at_half_rate(own, facts) or if_recorded(modelled, own, facts)


def at_half_rate(own: list[str], facts: Facts) -> Finding | None:
    """Tell of plain FP8 on a GPU that multiplies block-scaled FP8 faster, by the datasheet."""
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
        explanation=f"By the datasheet {gpu.block_scaled_fp8_tflops:,.0f} beside {gpu.fp8_tflops:,.0f} "
        f"TFLOP/s, and BF16 {gpu.bf16_tflops:,.0f}; nothing was timed. torchao 0.18 and Transformer Engine "
        "2.20 do not train in it on this GPU: what gains is a matrix product of your own that takes all "
        "block scales as 1.",
        evidence={
            "own_recipe": tuple(own),
            "gpu": gpu.name,
            "fp8_tflops": gpu.fp8_tflops,
            "block_scaled_fp8_tflops": gpu.block_scaled_fp8_tflops,
        },
    )


def modelled(own: list[str], facts: Facts) -> Finding | None:
    """Tell that tensorwise is modelled as faster, by more than the model may be off.

    Steps that were watched take what the model does not know of, too.
    """
    watched = recorded(facts, "observed.steps_ms") and facts.observed.steps_ms
    if watched or not is_given(facts) or own not in (["rowwise"], ["rowwise_with_gw_hp"]):
        return None
    step, other = modelled_step(facts), modelled_step(with_recipe(facts, TENSORWISE))
    if step is None or other is None or step.step_ms / other.step_ms - 1 <= MODEL_ERROR:
        return None
    return Finding(
        severity="info",
        title=f"The recipe {TENSORWISE} may be about {step.step_ms / other.step_ms:.2f}x as fast as {own[0]}",
        explanation=f"The step would take {other.step_ms:,.1f} instead of {step.step_ms:,.1f} ms (modelled "
        f"on {step.gpu}); nothing was timed. The recipes differ in exactness too: watch the loss.",
        evidence={
            "own_recipe": tuple(own),
            "faster_recipe": TENSORWISE,
            "modelled_step_ms": step.step_ms,
            "modelled_faster_step_ms": other.step_ms,
            "gpu": step.gpu,
        },
    )


def pays_by_block(facts: Facts, base: Arm, changed: Arm) -> bool:
    """Whether what was timed block by block is faster than the user's one graph too, where it is one."""
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
    arms = [Arm(name=ArmName.AS_IS, tried=True, step_ms=step_ms[own], rounds_ms=(step_ms[own],) * 6)]
    for recipe, ms in step_ms.items():
        if recipe != own:
            arms.append(
                Arm(
                    name=recipe_change(recipe),
                    base=ArmName.AS_IS,
                    tried=True,
                    step_ms=ms,
                    rounds_ms=(ms,) * 6,
                )
            )
    return Facts(
        network=Network(linears=(Linear(use="training", recipe=own),)),
        trial=Trial(device="cuda", gpu="NVIDIA H200", arms=tuple(arms)),
    )


SICK = _compiled("rowwise", tensorwise=88.31, rowwise=122.57, rowwise_with_gw_hp=94.21)
HEALTHY = _compiled("tensorwise", tensorwise=71.55, rowwise=85.76, rowwise_with_gw_hp=83.57)
