"""A 16-bit matmul is slow because of its sides

What it finds. A Linear that stays in 16 bits next to FP8 layers has a side that is not a multiple of 8. It
costs 5% of the step or more.

Why it matters. FP8 conversions leave the output head in 16 bits, and a vocabulary such as GPT-2's 50257 is
not a multiple of 8. Such a matrix has rows that do not begin at 16 bytes. Then cuBLAS cannot use kernels that
read whole vectors, and the matmul runs at a sixth of the speed. The faster the rest gets in FP8, the larger
this layer's share. With a 454M decoder on an H200, padding 50,257 to 50,304 took the compiled FP8 step from
129.8 ms to 95.1 ms.

Fix. Pad the side to a multiple of 64: the model's vocabulary, not the tokenizer's. The new rows are never a
label. If head and embedding are tied, both grow. For a trained model, call
`model.resize_token_embeddings(pad_to_multiple_of=64, mean_resizing=False)`.

    config = GPT2Config(vocab_size=50257)  # before

    from transformers import GPT2Config
    config = GPT2Config(vocab_size=50304)  # after: a multiple of 64

When to ignore it. If the checkpoint's shape must stay as it is.

How it is detected, and limits. fp8doctor estimates what padding saves, and limits it by the 16-bit matmul
time in the profiled step. Compiled layers need a profile, because Inductor may pad by itself.

References. `research/benchmarks/measured/h200_padded_vocabulary.json.gz`; with 50257 the kernel is
`cutlass_75_tensorop_bf16_s1688gemm`. NVIDIA asks for 8 elements, 64 on an A100:
https://docs.nvidia.com/deeplearning/performance/dl-performance-matrix-multiplication/index.html Inductor's
`shape_padding`: https://github.com/pytorch/pytorch/blob/main/torch/_inductor/config.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from fp8doctor.analysis.timed_step import as_is
from fp8doctor.cost import GpuSpec, calls_of, gemms, micro_batches, modelled_gpu, rows_of, step_gemms_ms
from fp8doctor.cost.eager import UNCERTAINTY
from fp8doctor.cost.gemm import MULTIPLE
from fp8doctor.cost.step_cost import modelled_step
from fp8doctor.facts import Facts, Linear, Network
from fp8doctor.facts.examples import example, float8
from fp8doctor.finding import Finding, NotApplicable, Saving, Treatment
from fp8doctor.registry import check

PADDED = 64
"""Elements to pad to: 128 bytes, as NVIDIA asks on an A100; 8 are enough elsewhere."""

WORTH_PCT = 5.0
"""Percent of the step from which padding is worth it: twice the noise of a step (2%), and a margin."""


class StepTime(NamedTuple):
    """The step, and its matmuls in 16 bits."""

    ms: float
    gemms_16bit_ms: float | None
    """None if it was not profiled."""


@check("SHP008", "slow-16-bit-gemm", area="shapes", severity="warning", about_shapes=True)
def slow_16_bit_gemm(facts: Facts) -> Finding | NotApplicable | None:
    linears = facts.network.linears
    if not any(linear.use == "training" for linear in linears):
        return NotApplicable(reason="no FP8 layer in the model")
    tokens, gpu, step = facts.workload.tokens, modelled_gpu(facts), step_of(facts)
    if step is None:
        _ = [each.flops_per_token for each in linears if each.get("role") == "experts"]  # unknown without
    if gpu is None or step is None or tokens is None:
        return NotApplicable(reason="the step was neither timed nor estimated")
    slow = [linear for linear in linears if is_slow(linear, profiled=step.gemms_16bit_ms is not None)]
    if not slow:
        return None
    now, padded = (total_ms(slow, facts, gpu, pad=pad) for pad in (False, True))
    saved = now - padded
    if step.gemms_16bit_ms is not None:
        in_16bit = [linear for linear in linears if linear.use == "none"]
        saved = min(saved, step.gemms_16bit_ms - total_ms(in_16bit, facts, gpu, pad=True))
    if saved < WORTH_PCT / 100 * step.ms:
        return None
    first = max(slow, key=lambda linear: linear.in_features * linear.out_features)
    profiled = (
        f" All 16-bit matmuls of the profiled step take {step.gemms_16bit_ms:,.1f} ms."
        if step.gemms_16bit_ms is not None
        else ""
    )
    return Finding(
        title=f"{first.name} ({first.in_features} x {first.out_features}, 16 bits) runs at a sixth of the "
        f"speed, because a side is not a multiple of {MULTIPLE}"
        f"{f'; {len(slow) - 1} more layers do' if len(slow) > 1 else ''}",
        explanation=f"Matmuls of {first.name} take {now:,.1f} ms/step now, and {padded:,.1f} ms with sides "
        f"padded to multiples of {PADDED} (estimated for {gpu.name}).{profiled}",
        evidence={
            "layers": len(slow),
            "first": first.name,
            "in_features": first.in_features,
            "out_features": first.out_features,
            "tokens": tokens,
            "now_ms": now,
            "padded_ms": padded,
            "step_ms": step.ms,
            "profiled_16bit_gemms_ms": step.gemms_16bit_ms,
        },
        saving_ms=Saving(
            low=saved * (1 - UNCERTAINTY), high=saved * (1 + UNCERTAINTY), basis="modelled", gpu=gpu.name
        ),
        treatment=padding(first, facts.network),
    )


def step_of(facts: Facts) -> StepTime | None:
    """Find the profiled step, else the modelled one; None without either."""
    arm = as_is(facts)
    if arm is not None and (step_ms := arm.get("step_ms")):
        breakdown = arm.get("breakdown")
        if breakdown is not None and facts.trial.device != "cpu":
            return StepTime(step_ms, breakdown.families_ms.get("gemm_16bit", 0.0))
    modelled = modelled_step(facts)
    return StepTime(modelled.step_ms, None) if modelled else None


def is_slow(linear: Linear, *, profiled: bool) -> bool:
    """Whether this layer's rows do not begin at 16 bytes; if compiled, only a profile shows the cost."""
    ragged = linear.in_features % MULTIPLE or linear.out_features % MULTIPLE
    return bool(
        ragged
        and linear.use == "none"
        and linear.dtype in ("bfloat16", "float16")
        and linear.role != "experts"
        and (profiled or linear.compiled is None)
    )


def total_ms(linears: Sequence[Linear], facts: Facts, gpu: GpuSpec, *, pad: bool) -> float:
    """Model these layers' 16-bit matmuls in one step, as they are or padded."""
    total = 0.0
    for linear in linears:
        rows, sides = rows_of(linear, facts) or 0, (linear.in_features, linear.out_features)
        m, k, n = (round_up(each) if pad else each for each in (rows, *sides))
        trained = linear.requires_grad is not False
        once = step_gemms_ms(m, k, n, gpu, fp8=False, weight_gradient=trained) or 0.0
        total += once * gemms(linear) * calls_of(linear, facts) * micro_batches(facts)
    return total


def round_up(side: int) -> int:
    """Return the next multiple of `PADDED` if a side is not a multiple of `MULTIPLE`."""
    return side if side % MULTIPLE == 0 else -(-side // PADDED) * PADDED


def padding(linear: Linear, network: Network) -> Treatment:
    """Pad the vocabulary if the layer is its head, else the layer."""
    sides = (linear.in_features, linear.out_features)
    vocabulary = network.get("vocabulary")
    if linear.role == "head" and vocabulary and vocabulary in sides:
        wide = round_up(vocabulary)
        transformers = network.get("kind", "").startswith("transformers.")
        return Treatment(
            name="pad-vocabulary",
            summary=f"pad the model's vocabulary from {vocabulary} to {wide}, not the tokenizer's",
            code=f"model.resize_token_embeddings(pad_to_multiple_of={PADDED}, mean_resizing=False)   # "
            f"{vocabulary} -> {wide}"
            if transformers
            else f"vocab_size = {wide}   # not {vocabulary}: for embedding and head",
        )
    k, n = (round_up(side) for side in sides)
    return Treatment(
        name="pad-dimensions",
        summary="pad the layer's sides to multiples of 64",
        code=f"nn.Linear{sides}  ->  nn.Linear({k}, {n})   # {linear.name}",
    )


def _decoder(vocabulary: int) -> Facts:
    plain = {"stack": "torch", "use": "none", "recipe": None, "role": "head"}
    linears = (float8("up", compiled=""), float8("head", out_features=vocabulary, **plain))
    batch = {"batch_source": "given", "tokens": 16384, "sequence_length": 1024, "accumulate": 1}
    return example(linears=linears, vocabulary=vocabulary, blocks=(), trainable_parameters=10**8, **batch)


SICK = _decoder(vocabulary=50257)
HEALTHY = _decoder(vocabulary=50304)
