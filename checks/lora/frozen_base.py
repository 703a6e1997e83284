"""A frozen base leaves two of three matmuls

What it finds. FP8 layers whose weight is frozen, as under LoRA: FP8 can speed up less of them.

Why it matters. A trained layer runs three matmuls, a frozen one two: it has no weight gradient. So FP8 has a
third less to speed up, while most of its cost stays. The weight never changes, but is scaled and cast in
every forward and every backward. With few tokens this costs more than the matmuls save. Without compilation,
torchao (0.10 to 0.18) still computes the weight gradient and throws it away. One LoRA step ran 330 FP8
matmuls not compiled and 221 compiled, for 112 frozen layers.

Fix. Compile, and use more tokens per step, which share one cast of the weight. Transformer Engine can keep
frozen weights in FP8 alone (2.9 or newer; before: `te.fp8_model_init`). torchao's layers cannot (0.18).

    model = build_model()  # before: BF16 weights, cast in every step

    import transformer_engine.pytorch as te
    with te.quantized_model_init(enabled=True):  # after: FP8 weights, cast once
        model = build_model()

When to ignore it. If FP8 is faster in your measured step: expect less than from full fine-tuning.

How it is detected, and limits. fp8doctor lists FP8 layers with `requires_grad=False`, and estimates what
their matmuls save and what the repeated casts cost. If the step was timed, it shows the measured speedup.

References. `matmul_with_hp_or_float8_args` of torchao 0.18; counted on one H200.
https://github.com/pytorch/ao/blob/v0.18.0/torchao/float8/float8_linear.py
https://docs.nvidia.com/deeplearning/transformer-engine/user-guide/api/pytorch.html
"""

from __future__ import annotations

from fp8doctor.analysis.arms import arm, fair_bf16, ratio_on_screen, uses_fp8
from fp8doctor.analysis.compile_coverage import compile_treatment, needs_compile
from fp8doctor.analysis.fp8_weights import frozen_fp8_weights
from fp8doctor.analysis.layers import flops_share_pct, named
from fp8doctor.analysis.noise import is_noise
from fp8doctor.cost import (
    Balance,
    calls_of,
    gemms,
    linear_cost,
    micro_batches,
    modelled_gpu,
    rows_of,
    weight_casts_ms,
)
from fp8doctor.facts import ArmName, Facts, Linear
from fp8doctor.facts.examples import example, float8, variant
from fp8doctor.finding import Finding, NotApplicable, Treatment
from fp8doctor.recipes import stack_of
from fp8doctor.registry import check


@check("LORA004", "frozen-base", area="lora", severity="info", explained_by=("CMP001", "CMP002"))
def frozen_base(facts: Facts) -> Finding | NotApplicable | None:
    if not uses_fp8(facts):
        return NotApplicable(reason="no layer is set up for FP8 training")
    fp8 = facts.network.fp8
    frozen = [linear for linear in fp8 if not linear.requires_grad and not is_stored_in_fp8(linear)]
    if not frozen:
        without = not facts.network.adapter_parameters
        learns = all(linear.requires_grad for linear in fp8)
        return NotApplicable(reason="no LoRA, and no frozen FP8 layer") if without and learns else None
    balance = frozen_balance(facts, frozen)
    modelled = ""
    if balance:
        modelled = (
            f" Estimated for {balance.gpu}: their FP8 matmuls save {balance.gemms_saved_ms:,.1f} ms/step, "
            f"and casting the same weights again costs {balance.casts_ms:,.1f} ms."
        )
    eager = [linear for linear in frozen if needs_compile(linear) and linear.compiled is None]
    wasted = " Without compilation, torchao still computes the weight gradients." if eager else ""
    now = arm(facts.trial, ArmName.PRESCRIBED) or arm(facts.trial, ArmName.AS_IS)
    bf16 = fair_bf16(facts, now) if now else None
    speedup = ratio_on_screen(bf16, now) if now and bf16 else None
    name = "with all fixes" if now and now.name == ArmName.PRESCRIBED else "as it is"
    where = facts.trial.gpu or facts.trial.device.upper()
    measured = (
        f" Measured on {where}: FP8 {name} is at {speedup.median:.2f}x of the best BF16."
        if now and bf16 and speedup and not is_noise(bf16, now, facts.trial)
        else ""
    )
    return Finding(
        title=f"{len(frozen)} of {len(fp8)} FP8 layers are frozen: each has two matmuls for FP8, not three"
        f"{named(frozen, len(fp8))}",
        explanation=f"A frozen weight needs no gradient.{modelled}{wasted}{measured}",
        evidence={
            "frozen_linears": len(frozen),
            "fp8_linears": len(fp8),
            "first": frozen[0].name,
            "flops_share_pct": flops_share_pct(frozen, facts),
            "frozen_weights_gib": sum(each.in_features * each.out_features * gemms(each) for each in frozen)
            * 2
            / 2**30,
            "modelled_gemms_saved_ms": balance.gemms_saved_ms if balance else None,
            "modelled_weight_casts_ms": balance.casts_ms if balance else None,
            "speedup": speedup.median if speedup else None,
            "speedup_low": speedup.low if speedup else None,
            "speedup_high": speedup.high if speedup else None,
        },
        treatment=compile_treatment(facts, eager) if eager else fp8_weights(frozen),
    )


def is_stored_in_fp8(linear: Linear) -> bool:
    """Whether Transformer Engine keeps the weight in FP8, so no step casts it."""
    return linear.get("features", {}).get("primary_weights_in_fp8") is True


def frozen_balance(facts: Facts, frozen: list[Linear]) -> Balance | None:
    """Weigh what these layers' two matmuls save in FP8 against casting their weights; None if unknown."""
    gpu = modelled_gpu(facts)
    if gpu is None:
        return None
    accumulate = micro_batches(facts)
    casts = saved = 0.0
    for linear in frozen:
        rows = rows_of(linear, facts)
        cost = linear_cost(linear, rows, gpu) if rows else None
        if cost is None:
            return None
        times = accumulate * gemms(linear) * calls_of(linear, facts)
        saved += times * cost.saved_ms
        casts += times * weight_casts_ms(linear.in_features, linear.out_features, gpu)
    return Balance(casts, saved, gpu.name)


def fp8_weights(frozen: list[Linear]) -> Treatment | None:
    """Propose weights in FP8 alone, if the stack can do that."""
    if not all(stack_of(linear).keeps_copies for linear in frozen):
        return None
    return frozen_fp8_weights(frozen)


def _lora(frozen: bool) -> Facts:
    layer = float8("layers.0.q_proj.base_layer", requires_grad=not frozen, compiled="layers.0")
    model = {"adapter_parameters": 1, "linears": (layer,), "blocks": (), "tokens": 8192}
    arms = (variant(ArmName.AS_IS, 135.7), variant(ArmName.BF16_COMPILED, 143.6))
    return example(**model, device="cuda", gpu="NVIDIA H200", arms=arms)


SICK = _lora(frozen=True)
HEALTHY = _lora(frozen=False)
