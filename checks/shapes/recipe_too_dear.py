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
exact. Ignore it if your loss needs the more exact recipe. Without a trial the cost model compares them.
Tensor parallelism makes each rank's layers narrow: a 70B model on 8 ranks was 1.52x as fast in tensorwise
(torchtitan#866).
GeForce Blackwell multiplies block-scaled FP8 at twice the rate of plain FP8, but no recipe of torchao 0.18 or
Transformer Engine 2.20 trains with that.
https://docs.pytorch.org/ao/main/workflows/training.html
https://github.com/pytorch/pytorch/issues/149990
https://github.com/triton-lang/triton/issues/11320
"""

from fp8doctor import kit


@kit.check(
    "SHP005",
    "recipe-too-dear",
    severity="warning",
    changes_fp8=True,
    needs_fp8=True,
    explained_by=("DST001",),
)
def recipe_too_dear(facts: kit.Facts) -> kit.Finding | kit.NotApplicable | None:
    own = tuple(sorted({linear.recipe or "unknown" for linear in facts.network.fp8}))
    on_cpu = kit.arms.timed_on_cpu(facts)
    if on_cpu or not kit.recorded(facts, "trial.arms"):
        if slow := at_half_rate(own, facts) or kit.if_recorded(estimated, own, facts):
            return slow
        if on_cpu:
            return kit.NotApplicable(reason="the trial timed no other recipe on a GPU")
    view = kit.trial_view.TrialView(facts)
    arms = [each.name for each in facts.trial.arms if each.tried and each.step_ms and each.rounds_ms]
    others = [view.timed[name] for name in arms if name in kit.recipes.BY_TREATMENT]
    pairs = [(base, each) for each in others if (base := view.base_of(each))]
    if not pairs:
        return kit.NotApplicable(reason="no other recipe was timed")
    faster = [pair for pair in pairs if is_faster(*pair, view)]
    if not faster:
        return None
    base, best = max(faster, key=lambda pair: kit.arms.ratio(pair[0].arm, pair[1].arm).value)
    gain, recipe = kit.arms.ratio(base.arm, best.arm), kit.recipes.BY_TREATMENT[best.name].name
    was_ms, ms = base.ms.value, best.ms.value
    return kit.Finding(
        title=f"The recipe {recipe} is {kit.times(was_ms, ms)} as fast as {', '.join(own)}",
        explanation=f"Timed in turn, the step takes {ms:,.1f} instead of {was_ms:,.1f} "
        f"ms{', both compiled block by block' if base.name == 'compile-blocks' else ''}. The recipes also "
        "differ in exactness: watch the loss.",
        evidence={
            "own_recipe": own,
            "faster_recipe": recipe,
            "of_arm": base.name,
            "base_step_ms": was_ms,
            **{f"{kit.recipes.BY_TREATMENT[each.name].name}_step_ms": each.ms.value for _, each in pairs},
            "speedup": gain.value,
            "speedup_low": gain.low,
            "speedup_high": gain.high,
        },
        saving_ms=view.saving(base, best),
        treatment=kit.describe(best.name, facts),
    )


def is_faster(base: kit.arms.Variant, other: kit.arms.Variant, view: kit.trial_view.TrialView) -> bool:
    """Whether it is for sure, in a script too, and by block also faster than the user's single graph."""
    gain, shown = kit.arms.ratio(base.arm, other.arm), kit.noise.script_interval(other.arm, view.trial)
    if base.name == "compile-blocks" and view.as_is and kit.arms.ratio(view.as_is.arm, other.arm).low <= 1:
        return False
    within = shown is not None and shown.high >= base.ms.value
    return not within and gain.low > 1 and gain.value - 1 > kit.EVEN


def at_half_rate(own: tuple[str, ...], facts: kit.Facts) -> kit.Finding | None:
    """Report plain FP8 on a GPU whose datasheet has a higher rate for block-scaled FP8."""
    gpu = kit.cost.modelled_gpu(facts)
    plain = all(kit.recipes.named(each).granularity in ("tensor", "row") for each in own)
    if gpu is None or not gpu.block_scaled_fp8_tflops or not gpu.fp8_tflops or not plain:
        return None
    rate = gpu.block_scaled_fp8_tflops / gpu.fp8_tflops
    return kit.Finding(
        severity="info",
        title=f"{gpu.name} multiplies block-scaled FP8 (MXFP8) {rate:.1f} times as fast as {', '.join(own)}",
        explanation=f"Datasheet: {gpu.block_scaled_fp8_tflops:,.0f} TFLOP/s against {gpu.fp8_tflops:,.0f}, "
        f"and {gpu.bf16_tflops:,.0f} in BF16; nothing was timed. torchao 0.18 and Transformer Engine 2.20 "
        "do not train in MXFP8 on this GPU.",
        evidence={"own_recipe": own, "gpu": gpu.name, "block_scaled_fp8_tflops": gpu.block_scaled_fp8_tflops},
    )


def estimated(own: tuple[str, ...], facts: kit.Facts) -> kit.Finding | None:
    """Report the recipe of the same stack that the cost model makes faster by more than its error.

    Layers that have to be compiled are compared as they are then.
    """
    eager = any(each.compiled is None and kit.needs_compile(each) for each in facts.network.fp8)
    facts = kit.cost.with_linears_compiled(facts, yes=True) if eager else facts
    found = kit.modelled_fix.faster_recipe(facts) if len(own) == 1 else None
    if found is None:
        return None
    recipe, steps = found
    now, then = steps.now, steps.then
    return kit.Finding(
        title=f"The recipe {recipe.name} is about {steps.speedup:.2f}x as fast as {own[0]} (estimated)",
        explanation=f"Estimated for {now.gpu}: {'compiled, ' * eager}the step takes {then.step_ms:,.1f} "
        f"instead of {now.step_ms:,.1f} ms. The recipes also differ in exactness: watch the loss.",
        evidence={"own_recipe": own, "faster_recipe": recipe.name, "faster_step_ms": then.step_ms},
        saving_ms=steps.saving,
        treatment=kit.describe(recipe.treatment, facts),
    )


def _compiled(own: str, **step_ms: float) -> kit.Facts:
    """Compiled decoders as measured on an H200, in ms; the model's own recipe is the step as it is."""
    timed = [kit.variant("as_is", step_ms.pop(own))]
    timed += [kit.variant(f"recipe-{name}", ms, base="as_is") for name, ms in step_ms.items()]
    layers = (kit.float8(recipe=own),)
    return kit.example(linears=layers, device="cuda", gpu="NVIDIA H200", arms=tuple(timed))


FIRES = _compiled("rowwise", tensorwise=88.31, rowwise=122.57)
SILENT = _compiled("tensorwise", tensorwise=71.55, rowwise=85.76)
