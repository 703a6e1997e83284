"""The GPU waits for the host

Looks at: how long the GPU is idle in a step as it is, which is the unprofiled step less the time
its kernels take, and whether its gaps end with kernels that were launched after it had run dry.

Why it costs time. Every kernel is launched by Python on the host. FP8 adds launches: about 83 for
each uncompiled layer of torchao, and 0.9 ms of host time instead of 0.15 for each layer of
Transformer Engine. With few tokens the GPU is done before the next launch comes, and FP8 makes no
step shorter that waits for the host. That the host is busy proves nothing: it is for 84 to 99 %
of every healthy step. Nor is uncompiled FP8 at many tokens host-bound: there the GPU is busy with
casts.

What to do. Fewer launches, or more work for each: compile; CUDA graphs; a larger batch in fewer
micro-batches.

    per_device_train_batch_size=4, gradient_accumulation_steps=8    # before
    per_device_train_batch_size=8, gradient_accumulation_steps=4    # after: half the launches

Evidence: one H200, Llama 1B, 256 tokens: every FP8 step loses, 0.62x of compiled BF16 at best,
and host time is the step's time. At 16,384 tokens the GPU is busy for 96 to 99 % of it.
https://github.com/NVIDIA/TransformerEngine/issues/445
https://docs.pytorch.org/docs/stable/torch.compiler_cudagraph_trees.html
"""

from __future__ import annotations

from fp8doctor.facts import Arm, Blocks, Breakdown, Facts, Linear, Network, Training, Trial, Workload, recorded
from fp8doctor.finding import Finding, NotApplicable, Treatment
from fp8doctor.measured import best_bf16, timed, uses_fp8
from fp8doctor.overview import percent
from fp8doctor.regions import compile_treatment, needs_compile
from fp8doctor.registry import check
from fp8doctor.waterfall import breakdown_of, profiled_on_gpu, waits_for_the_host


@check(
    "STP001", "host-bound", area="step", severity="warning", needs=("network.linears.compiled", "network.blocks", "trial.arms.breakdown"),
    explained_by=("ENV006", "CMP001", "CMP002", "CMP003", "CMP005", "SHP003"),
)  # fmt: skip
def host_bound(facts: Facts) -> Finding | NotApplicable | None:
    profiled = profiled_on_gpu(facts)
    if isinstance(profiled, NotApplicable):
        return profiled
    now, found, step_ms = profiled
    if not waits_for_the_host(now):
        return None
    bf16, verdict = best_bf16(facts), timed(facts)
    beside = breakdown_of(bf16) if bf16 and bf16 is not now else None
    compared = f" In the best BF16 step it is idle for {beside.idle_ms:.1f} ms." if beside else ""
    idle = 100 * found.idle_ms / step_ms
    return Finding(
        title=f"The GPU is idle for {percent(idle)} of the step, waiting for the host",
        explanation=f"It has nothing to do for {found.idle_ms:.1f} of {step_ms:.1f} ms, and {percent(found.host_wait_pct or 0.0)} of its gaps end with a "
        f"kernel that was launched too late. There are {found.kernels:,} kernels a step, of {1e3 * found.busy_ms / max(found.kernels, 1):.0f} µs.{compared}",
        evidence={
            "idle_ms": found.idle_ms,
            "idle_pct": idle,
            "host_wait_pct": found.host_wait_pct,
            "kernels": found.kernels,
            "busy_ms": found.busy_ms,
            "step_ms": step_ms,
            "bf16_idle_ms": beside.idle_ms if beside else None,
        },
        severity="info" if not uses_fp8(facts) or (verdict and verdict.status == "fp8_faster") else None,
        treatment=treatment(facts),
    )


def treatment(facts: Facts) -> Treatment:
    """Compile what is eager; record what is compiled once and launch it together; where a graph cannot, more work for each launch."""
    eager = [linear for linear in facts.network.linears if needs_compile(linear) and linear.compiled is None]
    if eager:
        return compile_treatment(facts, eager)
    accumulate = facts.workload.accumulate if recorded(facts.workload) and recorded(facts.workload.accumulate) else 1
    if accumulate == 1 and any(linear.compiled is not None for linear in facts.network.linears):
        return Treatment(
            name="cuda-graphs",
            summary="let the compiler record its kernels as CUDA graphs, each of which is one launch",
            code='for block in blocks:   # where they are compiled now\n    block.compile(mode="reduce-overhead")',
        )
    return Treatment(
        name="larger-batch",
        summary="put more tokens into a micro-batch, and accumulate over fewer",
        code="TrainingArguments(..., per_device_train_batch_size=2 * BATCH, gradient_accumulation_steps=STEPS // 2)",
    )


def _llama_1b_in_te(idle_ms: float) -> Facts:
    """Transformer Engine, uncompiled, 256 tokens: the step of an H200; how it divides is made up."""
    step = 41.5
    parts = Breakdown(
        families_ms={"gemm_fp8": 4.0, "cast": 2.0, "pointwise": step - idle_ms - 6.0}, idle_ms=idle_ms, host_wait_pct=92.0, busy_ms=step - idle_ms,
        scale=1.0, reliable=True, kernels=2400, unclassified_pct=0.0,
    )  # fmt: skip
    now = Arm(name="as_is", tried=True, reason=None, step_ms=step, rounds_ms=(step,) * 6, breakdown=parts)
    layer = Linear(name="layers.0.up", stack="transformer_engine", use="training", compiled=None)
    blocks = (Blocks(name="layers", kind="transformers.models.llama.modeling_llama.LlamaDecoderLayer", count=8, compiled=0),)
    network = Network(linears=(layer,), blocks=blocks)
    return Facts(network=network, training=Training(), workload=Workload(tokens=256, accumulate=1), trial=Trial(device="cuda", arms=(now,), reliable=True))


SICK = _llama_1b_in_te(idle_ms=27.0)
HEALTHY = _llama_1b_in_te(idle_ms=1.2)
