"""Another FP8 recipe is faster here

Recipes differ in casts and kernels. `tensorwise` has one scale per tensor, which the fastest FP8 kernels use.
`rowwise` has one per row and column: its casts cost more and its matmuls are slower. Small layers (K, N up to
about 2048) never earn that back. `rowwise_with_gw_hp` keeps the weight gradient in BF16. In Transformer
Engine, delayed scaling knows its scales in advance, current scaling reads every tensor once more, and block
scaling works in blocks of 128. A 468M decoder took 92.8 ms/step with tensorwise and 126.0 ms with rowwise
(BF16: 98.2 ms, `h200-decoder_468m_compiled`).

    config = Float8LinearConfig.from_recipe_name("rowwise")     # before

    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    config = Float8LinearConfig.from_recipe_name("tensorwise")  # after
    convert_to_float8_training(model, config=config)

The trial times the step with each other recipe, all else equal. Watch the loss: `tensorwise` is the least
exact. Ignore it if your loss needs the more exact recipe. Without a trial two things are information. The
cost model expects tensorwise to be 15% faster with your batch. Or the GPU (GeForce Blackwell) multiplies
block-scaled FP8 at twice the rate of plain FP8. No recipe of torchao 0.18 or Transformer Engine 2.20 trains
with that.
https://docs.pytorch.org/ao/main/workflows/training.html
https://github.com/triton-lang/triton/issues/11320
"""

from __future__ import annotations

from fp8doctor.kit import (
    EVEN,
    Arm,
    ArmName,
    Facts,
    Finding,
    NotApplicable,
    arms,
    check,
    describe,
    example,
    float8,
    if_recorded,
    is_given,
    modelled_gpu,
    recipes,
    recorded,
    script_interval,
    sentence_of,
    step_cost,
    times,
    variant,
)

MODEL_ERROR = 0.15
"""Share by which another recipe must be faster if both are modelled. A convention."""


@check(
    "SHP005", "recipe-too-dear", area="shapes", severity="warning", changes_fp8=True, explained_by=("DST001",)
)
def recipe_too_dear(facts: Facts) -> Finding | NotApplicable | None:
    own = tuple(sorted({linear.recipe or "unknown" for linear in facts.network.fp8}))
    if not own:
        return NotApplicable(reason="no layer is set up for FP8 training")
    on_cpu = arms.timed_on_cpu(facts)
    if on_cpu or not recorded(facts, "trial.arms"):
        if expected := _at_half_rate(own, facts) or if_recorded(_modelled, own, facts):
            return expected
        if on_cpu:
            return NotApplicable(reason="the trial timed no other recipe on a GPU")
    others = [each for each in facts.trial.arms if each.name in recipes.BY_TREATMENT]
    pairs = [(base, each) for each in others if each.tried and (base := arms.base_of(facts.trial, each))]
    if not pairs:
        reasons = "; ".join(sorted({reason for each in others if (reason := sentence_of(each))}))
        return NotApplicable(reason=f"no other recipe was timed{reasons and f': {reasons}'}")
    faster = [pair for pair in pairs if _is_faster(*pair, facts)]
    if not faster:
        return None
    base, best = max(faster, key=lambda pair: arms.ratio(*pair).value)
    gain, recipe = arms.ratio(base, best), recipes.BY_TREATMENT[best.name].name
    return Finding(
        title=f"The recipe {recipe} is {times(base.step_ms, best.step_ms)} as fast as {', '.join(own)}",
        explanation=f"Timed in turn, the step takes {best.step_ms:,.1f} instead of {base.step_ms:,.1f} "
        f"ms{', both compiled block by block' if base.name == 'compile-blocks' else ''}. The recipes also "
        "differ in exactness: watch the loss.",
        evidence={
            "own_recipe": own,
            "faster_recipe": recipe,
            "of_arm": base.name,
            "base_step_ms": base.step_ms,
            **{f"{recipes.BY_TREATMENT[each.name].name}_step_ms": each.step_ms for _, each in pairs},
            "speedup": gain.value,
            "speedup_low": gain.low,
            "speedup_high": gain.high,
        },
        saving_ms=arms.measured_saving(facts.trial, base, best),
        treatment=describe(best.name, facts),
    )


def _is_faster(base: Arm, other: Arm, facts: Facts) -> bool:
    """Whether it is for sure, in a script too, and by block also faster than the user's single graph."""
    gain, shown, as_is = (
        arms.ratio(base, other),
        script_interval(other, facts.trial),
        arms.arm(facts.trial, ArmName.AS_IS),
    )
    one_graph = as_is if base.name == "compile-blocks" else None
    return (
        gain.low > 1
        and gain.value - 1 > EVEN
        and (one_graph is None or arms.ratio(one_graph, other).low > 1)
        and (shown is None or base.step_ms is None or shown.high < base.step_ms)
    )


def _at_half_rate(own: tuple[str, ...], facts: Facts) -> Finding | None:
    """Report plain FP8 on a GPU whose datasheet has a higher rate for block-scaled FP8."""
    gpu, plain = (
        modelled_gpu(facts),
        all(recipes.named(each).granularity in ("tensor", "row") for each in own),
    )
    if gpu is None or not gpu.block_scaled_fp8_tflops or not gpu.fp8_tflops or not plain:
        return None
    rate = gpu.block_scaled_fp8_tflops / gpu.fp8_tflops
    return Finding(
        severity="info",
        title=f"{gpu.name} multiplies block-scaled FP8 (MXFP8) {rate:.1f} times as fast as {', '.join(own)}",
        explanation=f"Datasheet: {gpu.block_scaled_fp8_tflops:,.0f} TFLOP/s against {gpu.fp8_tflops:,.0f}, "
        f"and {gpu.bf16_tflops:,.0f} in BF16; nothing was timed. torchao 0.18 and Transformer Engine 2.20 "
        "do not train in MXFP8 on this GPU. Your own kernel could use the rate with all block scales set "
        "to 1.",
        evidence={"own_recipe": own, "gpu": gpu.name, "block_scaled_fp8_tflops": gpu.block_scaled_fp8_tflops},
    )


def _modelled(own: tuple[str, ...], facts: Facts) -> Finding | None:
    """Report that tensorwise is modelled as faster by more than the model's error, for unwatched steps."""
    rowwise = own in (("rowwise",), ("rowwise_with_gw_hp",))
    if facts.get("observed.steps_ms") or not is_given(facts) or not rowwise:
        return None
    step, other = (
        step_cost.modelled_step(facts),
        step_cost.modelled_step(step_cost.with_recipe(facts, "tensorwise")),
    )
    if step is None or other is None or step.step_ms / other.step_ms - 1 <= MODEL_ERROR:
        return None
    return Finding(
        severity="info",
        title=f"The recipe tensorwise may be about {step.step_ms / other.step_ms:.2f}x as fast as {own[0]}",
        explanation=f"The step would take {other.step_ms:,.1f} instead of {step.step_ms:,.1f} ms (estimated "
        f"for {step.gpu}; nothing was timed). The recipes also differ in exactness: watch the loss.",
        evidence={
            "own_recipe": own,
            "modelled_step_ms": step.step_ms,
            "modelled_faster_step_ms": other.step_ms,
        },
    )


def _compiled(own: str, **step_ms: float) -> Facts:
    """Compiled decoders as measured on an H200, in ms; the model's own recipe is the step as it is."""
    others = (
        variant(f"recipe-{name}".replace("_", "-"), ms, base="as_is")
        for name, ms in step_ms.items()
        if name != own
    )
    timed = (variant("as_is", step_ms[own]), *others)
    return example(linears=(float8(recipe=own),), device="cuda", gpu="NVIDIA H200", arms=timed)


FIRES = _compiled("rowwise", tensorwise=88.31, rowwise=122.57, rowwise_with_gw_hp=94.21)
SILENT = _compiled("tensorwise", tensorwise=71.55, rowwise=85.76, rowwise_with_gw_hp=83.57)
