"""LoRA's share of the step

What it finds. How much of the step the LoRA adapters take, measured, next to their share of the parameters
and of the matmul FLOPs.

Why it matters. FP8 does nothing for the adapters: their matmuls are too narrow (rank 8 to 128), so their time
limits the gain of everything else. Their FLOPs mislead. At rank 32 on a 4096 x 4096 layer they are 2.3%. But
every adapted layer adds two forward and four backward kernels, an addition, and with fp32 adapters a copy of
each input. Rank hardly matters: 32 instead of 8 costs 2% of a compiled BF16 step and 5% in FP8. Llama 1B with
rank 16 takes 143.6 ms/step, full fine-tuning 128.4 ms (compiled).

Fix. Compile the blocks, keep the adapters in the base's dtype (PEFT 0.12 or newer), adapt fewer projections,
or use fused LoRA kernels. Lower the rank only if it measures faster.

    model = get_peft_model(base, config)  # before: fp32 adapters, not compiled

    from peft import get_peft_model
    model = get_peft_model(base, config, autocast_adapter_dtype=False)  # after
    for block in base.model.layers:
        block.compile()

When to ignore it. If the adapters take little of your step: the finding is only information.

How it is detected, and limits. The trial times the step once more with the adapters switched off. The upper
bound for FP8 assumes that everything else runs at FP8's peak rate. Without a trial on a GPU, only the shares
of parameters and FLOPs are known.

References. `tests/benchmarks/measured/h200_steps.json.gz` (223.3 ms against 162.8 ms, not compiled).
https://github.com/huggingface/peft/blob/v0.21.0/src/peft/tuners/lora/layer.py
https://arxiv.org/abs/2510.24061
"""

from __future__ import annotations

from fp8doctor.analysis.arms import arm, base_of, fair_bf16, ratio, timed_on
from fp8doctor.analysis.layers import flops_share_pct
from fp8doctor.analysis.significance import EVEN
from fp8doctor.cost import amdahl, modelled_gpu
from fp8doctor.facts import Arm, ArmName, Facts, Linear, Trial, Value
from fp8doctor.facts.arm_names import in_any_window
from fp8doctor.facts.examples import example, float8, variant
from fp8doctor.facts.no_number import sentence_of
from fp8doctor.finding import Finding, NotApplicable, Treatment
from fp8doctor.registry import check
from fp8doctor.wording import percent

WITHOUT = ArmName.WITHOUT_ADAPTERS
"""The variant that switches the adapters off: a measurement, not a fix."""


@check("LORA001", "adapter-share", area="lora", severity="info")
def adapter_share(facts: Facts) -> Finding | NotApplicable | None:
    network = facts.network
    if not network.adapter_parameters:
        return NotApplicable(reason="no LoRA adapters in the model")
    adapters = [linear for linear in network.linears if linear.adapter == "adapter"]
    flops = flops_share_pct(adapters, facts)
    shares = (
        f"{percent(100 * network.adapter_parameters / network.parameters)} of the parameters and "
        f"{percent(flops)} of the matmul FLOPs"
    )
    evidence: dict[str, Value | tuple[Value, ...]] = {
        "adapter_parameters": network.adapter_parameters,
        "parameters_share_pct": 100 * network.adapter_parameters / network.parameters,
        "flops_share_pct": flops,
        "adapter_dtypes": tuple(sorted({linear.dtype for linear in adapters})),
    }
    without = arm(facts.trial, WITHOUT) if facts.trial.device != "cpu" else None
    base = base_of(facts.trial, without) if without else None
    if without is None or base is None or base.step_ms is None:
        return Finding(
            title=f"LoRA is {shares}",
            explanation=f"The trial did not measure what the adapters cost in time: {why_not(facts.trial)}.",
            evidence=evidence,
        )
    left = ratio(without, base)
    share, low, high = (100 * (1 - part) for part in (left.median, left.high, left.low))
    cost = base.step_ms * share / 100
    ceiling = fp8_ceiling(facts, base, cost)
    in_time = (
        f"{base.step_ms - (without.step_ms or 0.0):,.1f} of {base.step_ms:,.1f} ms/step"
        if low > 0
        else "no time beyond the timing noise"
    )
    bound = (
        f" FP8 does not speed them up. Upper bound: {ceiling:.2f}x BF16, if everything else ran at FP8's "
        "peak rate."
        if ceiling and low > 0
        else ""
    )
    return Finding(
        title=f"LoRA takes {in_time}, with {percent(flops)} of the matmul FLOPs",
        explanation=f"With the adapters switched off, the step takes {without.step_ms:,.1f} instead of "
        f"{base.step_ms:,.1f} ms. They are {shares}.{bound}",
        evidence=evidence
        | {
            "time_share_pct": share,
            "time_share_low_pct": low,
            "time_share_high_pct": high,
            "adapters_ms": cost,
            "measured_on": timed_on(facts.trial),
            "of_arm": in_any_window(base.name),
            "fp8_ceiling": ceiling,
        },
        treatment=cheaper_adapters() if low > 100 * EVEN else None,
    )


def why_not(trial: Trial) -> str:
    """Say why there is no time without adapters."""
    if trial.device == "cpu":
        return "the trial ran on a CPU, which says nothing about a GPU"
    attempt = next((each for each in trial.arms if each.name == WITHOUT), None)
    return (sentence_of(attempt) if attempt else None) or "it timed no step without them"


def fp8_ceiling(facts: Facts, base: Arm, adapters_ms: float) -> float | None:
    """Compute by Amdahl's law the speedup if all but the adapters ran at FP8's peak; None if unknown."""
    bf16, gpu = fair_bf16(facts, base), modelled_gpu(facts)
    if bf16 is None or not bf16.step_ms or gpu is None or gpu.fp8_tflops is None:
        return None
    return amdahl(1 - min(1.0, max(0.0, adapters_ms / bf16.step_ms)), gpu.fp8_tflops / gpu.bf16_tflops)


def cheaper_adapters() -> Treatment:
    return Treatment(
        name="cheaper-adapters",
        summary="compile, keep the adapters in the base's dtype, adapt fewer projections; lower the rank "
        "only if it measures faster",
        code=(
            'config = LoraConfig(r=16, target_modules=["q_proj", "v_proj"])   # fewer adapted layers, '
            "fewer small kernels\n"
            "model = get_peft_model(base, config, autocast_adapter_dtype=False)"
        ),
    )


def _llama_1b(parameters: int, *linears: Linear) -> Facts:
    """Llama 1B with rank 16, compiled, as measured on an H200; the time without adapters is invented."""
    arms = (
        variant(ArmName.AS_IS, 135.7),
        variant(ArmName.BF16_COMPILED, 143.6),
        variant(WITHOUT, 99.0, base=ArmName.AS_IS),
    )
    model = {"parameters": 1_247_086_592, "adapter_parameters": parameters, "linears": linears}
    return example(**model, device="cuda", gpu="NVIDIA H200", arms=arms)


BASE = float8("q.base_layer", use="none", adapter="base", flops_share_pct=97.5)

SICK = _llama_1b(11_272_192, BASE, float8("q.lora_A", use="none", adapter="adapter", flops_share_pct=2.5))
HEALTHY = _llama_1b(0)
