"""NaN or infinity in loss or gradients

One NaN in a gradient is in every weight after the next update, and no later step removes it. FP8 has less
range than BF16: 448 in E4M3, 57344 in E5M2. torchao and Transformer Engine clip larger values, which stay
finite and are wrong. A cast of your own may give NaN or infinity. Delayed scaling clips whenever a tensor
grows faster than its history, and training may diverge. A miscompiled cast writes NaN by itself.

    from transformer_engine.common.recipe import DelayedScaling
    recipe = DelayedScaling(amax_history_len=16)  # before: the last steps' scale

    from transformer_engine.common.recipe import Float8CurrentScaling
    recipe = Float8CurrentScaling()               # after

`DelayedScaling(margin=1)` helps too; `fp8doctor health` names the layers that overflow, to leave in BF16. A
lower learning rate and clipping help if gradients grow, in BF16 too. `fp8doctor run` watches the loss of
every step. The trial looks at loss and gradients in the first steps of your job, the fixed step and BF16,
with the same weights and batch. If BF16 is not finite either, FP8 is not the cause; with a random batch that
is a warning, to ignore.
https://docs.nvidia.com/deeplearning/transformer-engine/user-guide/examples/fp8_primer.html
https://github.com/pytorch/pytorch/issues/150859
"""

from fp8doctor import kit

ROUND_AS_EAGER = kit.Treatment(
    name="round-as-eager",
    summary="let compiled code round where eager code does, as torchtitan does with rowwise scaling",
    code="import torch._inductor.config\n\n"
    "torch._inductor.config.emulate_precision_casts = True   # before the first step",
)
"""Compiled, the recompute of a norm before a rowwise FP8 layer can differ from the forward: the loss becomes
NaN. Sources: pytorch#150859, torchtitan b5bcd76 (``components/quantization/float8.py``)."""


@kit.check(
    "NUM001",
    "non-finite",
    severity="error",
    explained_by=("NUM003", "incompatible-versions"),
    changes_fp8=True,
)
def non_finite(facts: kit.Facts) -> kit.Finding | kit.NotApplicable | None:
    finite = kit.own_step.finite_steps(facts)
    if finite.now and not finite.bf16:
        return not_of_fp8_alone(finite.bf16, finite.now, facts)
    if not kit.arms.uses_fp8(facts):
        return kit.NotApplicable(reason="no layer is set up for FP8 training")
    checked = [each for each in facts.trial.arms if each.tried and each.non_finite is not None]
    seen = [each for each in checked if each.name in (kit.ArmName.AS_IS, kit.ArmName.PRESCRIBED)]
    if not seen or finite.bf16 is None:
        return kit.NotApplicable(reason=f"the trial could not check a step in {'BF16' if seen else 'FP8'}")
    if finite.bf16 is False:
        return kit.NotApplicable(reason="loss or gradients are not finite in BF16 either")
    bad = [each for each in seen if each.non_finite]
    if not bad:
        return None
    names = tuple(dict.fromkeys(name for each in bad for name in each.non_finite or ()))
    now = any(each.name == kit.ArmName.AS_IS for each in bad)
    fixed = " With all fixes the step was finite." if now and len(bad) < len(seen) else ""
    where = "FP8" if now else "the fixed FP8 step, not in the step as it is"
    fp8, fix = facts.network.fp8, None
    if any((each.recipe or "").startswith("rowwise") and each.compiled is not None for each in fp8):
        fix = ROUND_AS_EAGER
    elif any(kit.stack_of(each).under_autocast for each in fp8):
        fix = kit.describe("te-current", facts)
    return kit.Finding(
        title=f"NaN or infinity in {' and '.join(names)} in {where}",
        explanation=f"With the same weights and batch, BF16 is finite.{fixed}",
        evidence={"non_finite": names, "arms": tuple(each.name for each in bad)},
        breaks="not_finite" if now else kit.NOT_RECORDED,
        treatment=fix if now else None,
    )


def not_of_fp8_alone(bf16: bool | None, names: tuple[str, ...], facts: kit.Facts) -> kit.Finding:
    """Report NaN that BF16 gives too, or that was not compared with BF16."""
    watched = facts.get("not_finite")
    certain = bool(watched) or kit.layer_gain.is_given(facts) or kit.recorded(facts, "observed")
    said = "FP8 is not the cause."
    if not certain:
        said = "The batch is random: pass a real one with example_batch()."
    elif bf16 is None:
        said = "fp8doctor did not see this step in BF16: train without FP8 to know if FP8 is the cause."
    first = f", first in step {watched.step:,}" if watched else ""
    too = ", in BF16 too" if bf16 is False and kit.arms.uses_fp8(facts) else ""
    return kit.Finding(
        severity=None if certain else "warning",
        title=f"NaN or infinity in {' and '.join(names)}{first}{too}",
        explanation=f"{watched.where} {said}" if watched and watched.where else said,
        evidence={"non_finite": names, "step": watched.step if watched else None},
        breaks="not_finite" if certain else kit.NOT_RECORDED,
    )


def _overflow(*non_finite: str) -> kit.Facts:
    """A step of two layers, the second of which overflows in FP8."""
    both = {kit.ArmName.AS_IS: non_finite, kit.ArmName.BF16: ()}
    arms = tuple(kit.Arm(name=name, tried=True, non_finite=found) for name, found in both.items())
    return kit.example(linears=tuple(map(kit.float8, ("up", "down"))), device="cuda", arms=arms)


FIRES = _overflow("loss", "gradients")
SILENT = _overflow()
