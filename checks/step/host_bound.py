"""The GPU waits for the host

What it finds. The GPU is idle for more than 10% of the step, because the host launches kernels too late.

Why it matters. Python on the host launches every kernel, and FP8 adds launches: about 83 per torchao layer
that is not compiled. A Transformer Engine layer takes the host several times as long as an nn.Linear, and
before release 2.16 even longer. With few tokens the GPU finishes before the next launch, and FP8 cannot
shorten a step that waits for the host. With 256 tokens, one job ran at 0.59x of BF16, idle for 64% of the
step. A busy host alone proves nothing: it is busy for 84 to 99% of every sound step.

Fix. Fewer launches, or more work per launch: compile, use a larger batch in fewer micro-batches, or CUDA
graphs (`torch.compile` with `mode="reduce-overhead"` or `"max-autotune"`). BF16 gains from CUDA graphs too,
and the trial does not time them. Upgrade a Transformer Engine before 2.16.

    args = TrainingArguments(per_device_train_batch_size=4, gradient_accumulation_steps=8)  # before

    from transformers import TrainingArguments
    args = TrainingArguments(per_device_train_batch_size=8, gradient_accumulation_steps=4)  # after

When to ignore it. If your real batch is larger.

How it is detected, and limits. Idle time is the unprofiled step minus its kernels' time. The gaps must end
with a late launch, and even the shortest step that the rounds allow must be idle for 10%. Waits for data do
not count. Without timing, a Transformer Engine step with your batch is estimated.

References. `h200-few_tokens`. `h100-llama_8b_compiled`, on a slow host: 177.2 ms in FP8 and 141.7 ms in BF16,
with CUDA graphs 134.9 ms and 131.6 ms. https://github.com/NVIDIA/TransformerEngine/issues/445
https://docs.pytorch.org/docs/stable/torch.compiler_cudagraph_trees.html
https://github.com/NVIDIA/TransformerEngine/pull/2439 https://github.com/NVIDIA/TransformerEngine/pull/2957
"""

from __future__ import annotations

from packaging.version import Version

from fp8doctor.analysis.arms import arm_if_any, best_bf16, uses_fp8
from fp8doctor.analysis.compile_coverage import compile_treatment, needs_compile
from fp8doctor.analysis.losing_layers import MANY_TOKENS, MOST_GROWTH
from fp8doctor.analysis.modelled_host import HostBound, modelled_host_bound
from fp8doctor.analysis.outcome import is_faster
from fp8doctor.analysis.recipe_support import installed
from fp8doctor.analysis.step_difference import breakdown_of, profiled_on_gpu, waits_for_the_host
from fp8doctor.analysis.treatment_table import LARGER_BATCH, MORE_TOKENS
from fp8doctor.analysis.waiting import host_is_ahead
from fp8doctor.cost import micro_batches
from fp8doctor.diagnosis.leaving_fp8 import stay_in_bf16
from fp8doctor.facts import Arm, ArmName, Blocks, Breakdown, Facts, Training, Workload, recorded
from fp8doctor.facts.examples import example, float8, profiled
from fp8doctor.finding import Finding, NotApplicable, Treatment
from fp8doctor.recipes import stack_of
from fp8doctor.registry import check
from fp8doctor.wording import percent, plural

MOST = 0.5
"""Share of the BF16 step above which idle time sets its pace: most of it."""

QUICKER = Version("2.16")
"""The last Transformer Engine that cut its modules' host time (TE#2957), after 2.10 (#2377), 2.12 (#2439) and
2.14 (#2559). Source: the tags that hold these pull requests."""


@check(
    "STP001",
    "host-bound",
    area="step",
    severity="warning",
    explained_by=("ENV006", "CMP001", "CMP002", "CMP003", "CMP005", "SHP003"),
)
def host_bound(facts: Facts) -> Finding | NotApplicable | None:
    if not recorded(facts, "trial") and not recorded(facts, "observed"):
        found_in_model = modelled_host_bound(facts)
        if found_in_model is not None:
            return modelled(found_in_model, facts)
    profiled = profiled_on_gpu(facts)
    if isinstance(profiled, NotApplicable):
        return profiled
    now, found, step_ms = profiled
    if not waits_for_the_host(now) or host_is_ahead(facts):
        return None
    bf16 = best_bf16(facts) if recorded(facts, "trial") else None
    parts = breakdown_of(bf16) if bf16 and bf16 is not now else None
    idle = 100 * found.idle_ms / step_ms
    return Finding(
        title=f"The GPU is idle for {percent(idle)} of the step, waiting for the host",
        explanation=f"The GPU has nothing to do for {found.idle_ms:,.1f} of {step_ms:,.1f} ms, and "
        f"{percent(found.host_wait_pct or 0.0)} of its gaps end with a late launch. A step launches "
        f"{found.kernels:,} kernels of {1e3 * found.busy_ms / max(found.kernels, 1):.0f} µs on "
        f"average.{in_bf16(bf16, parts)}{as_prescribed(facts)}{outdated(facts)}",
        evidence={
            "idle_ms": found.idle_ms,
            "idle_pct": idle,
            "host_wait_pct": found.host_wait_pct,
            "kernels": found.kernels,
            "busy_ms": found.busy_ms,
            "step_ms": step_ms,
            "bf16_idle_ms": parts.idle_ms if parts else None,
        },
        severity="info" if not uses_fp8(facts) or is_faster(facts) else None,
        treatment=treatment(facts),
    )


def modelled(found: HostBound, facts: Facts) -> Finding:
    """Report an untimed step: the host's time, and the tokens from which FP8 pays off."""
    step, layers = found.step, len(facts.network.fp8)
    name = stack_of(facts.network.fp8[0]).in_words
    tokens = facts.workload.tokens
    then = (
        f"FP8 pays off from about {found.pays_from:,} tokens per micro-batch."
        if found.pays_from
        else f"Up to {MANY_TOKENS:,} tokens, FP8 is not faster here."
    )
    return Finding(
        title=f"The host needs {step.host_ms:,.1f} ms to launch {plural(layers, f'{name} layer')}, a step in "
        f"compiled BF16 takes {found.bf16.step_ms:,.1f} ms (estimated)",
        explanation=f"This is for {tokens:,} tokens on {step.gpu}. In FP8 the GPU would compute for "
        f"{step.busy_ms:,.1f} ms/step. {then}{outdated(facts)}",
        evidence={
            "host_ms": step.host_ms,
            "busy_ms": step.busy_ms,
            "bf16_step_ms": found.bf16.step_ms,
            "speedup": round(found.speedup, 2),
            "tokens": tokens,
            "pays_from_tokens": found.pays_from,
            "fp8_layers": layers,
        },
        treatment=more_tokens(facts.workload, found.pays_from)
        if found.pays_from and found.pays_from <= MOST_GROWTH * (tokens or 1) * micro_batches(facts)
        else stay_in_bf16(facts, "launching FP8 takes the host longer than the GPU computes in BF16"),
    )


def more_tokens(workload: Workload, tokens: int) -> Treatment:
    """Write a micro-batch with this many tokens."""
    now = workload.batch_size or 1
    batch = now * tokens // (workload.tokens or tokens)
    return Treatment(
        name=MORE_TOKENS,
        summary=f"put {tokens:,} tokens into a micro-batch, and accumulate over fewer",
        code=f"batch_size = {batch}   # from {now}, or longer sequences: {tokens:,} tokens",
    )


def in_bf16(bf16: Arm | None, parts: Breakdown | None) -> str:
    """Describe the best BF16 step, and whether the host limits it too."""
    if bf16 is None or parts is None or not bf16.step_ms:
        return ""
    limited = waits_for_the_host(bf16) and parts.idle_ms > MOST * bf16.step_ms
    return (
        f" The best BF16 step launches {parts.kernels:,} and is idle for {parts.idle_ms:,.1f} of "
        f"{bf16.step_ms:,.1f} ms{': the host limits it too, which FP8 cannot change' if limited else ''}."
    )


def as_prescribed(facts: Facts) -> str:
    """Say what is left to do if the timed fixes are not enough."""
    changed = arm_if_any(facts, ArmName.PRESCRIBED)
    left = breakdown_of(changed) if changed and waits_for_the_host(changed) else None
    if changed is None or left is None or not changed.step_ms:
        return ""
    return (
        f" With the timed fixes it is still idle for {left.idle_ms:,.1f} of {changed.step_ms:,.1f} ms; try "
        "more tokens per step or CUDA graphs."
    )


def outdated(facts: Facts) -> str:
    """Name the release that needs less host time, if the layers' library is older; else empty."""
    of_te = any(linear.stack == "transformer_engine" for linear in facts.network.fp8)
    version = installed(facts, "transformer_engine") if of_te else None
    if version is None or version >= QUICKER:
        return ""
    return f" Transformer Engine {version} is installed; {QUICKER} and newer need less host time."


def treatment(facts: Facts) -> Treatment:
    """Compile the layers, else give each launch more work."""
    eager = [linear for linear in facts.network.linears if needs_compile(linear) and linear.compiled is None]
    if eager:
        return compile_treatment(facts, eager)
    return larger_batch(facts, micro_batches(facts))


def larger_batch(facts: Facts, accumulate: int) -> Treatment:
    """Write more samples per micro-batch and fewer micro-batches, for the Trainer if there is one."""
    trainer = facts.trainer()
    size = facts.get("workload.batch_size") if facts.get("workload.batch_source") == "given" else None
    times = next((each for each in range(2, accumulate) if accumulate % each == 0), max(accumulate, 2))
    samples = str(times * size) if size else f"{times} * BATCH"
    micro_batches = max(accumulate // times, 1)
    if trainer:
        steps = f", gradient_accumulation_steps={micro_batches}" if accumulate > 1 else ""
        kind = trainer.get("kind", "TrainingArguments").rpartition(".")[2]
        code = f"{kind}(..., per_device_train_batch_size={samples}{steps})"
    else:
        code = f"batch_size = {samples}   # samples in a micro-batch, {size or 'BATCH'} now"
        code += (
            f"\naccumulate = {micro_batches}   # micro-batches in a step, {accumulate} now"
            if accumulate > 1
            else ""
        )
    if accumulate > 1:
        return Treatment(
            name=LARGER_BATCH,
            summary="put more tokens into a micro-batch, and accumulate over fewer",
            code=code,
        )
    return Treatment(
        name=LARGER_BATCH,
        summary="put more tokens into a step, which changes the batch that the optimizer sees",
        code=code,
    )


def _llama_1b_in_te(idle_ms: float) -> Facts:
    """Transformer Engine, not compiled, 256 tokens: an H200's step; its parts are invented."""
    families = {"gemm_fp8": 4.0, "cast": 2.0, "pointwise": 35.5 - idle_ms}
    arms = (profiled(ArmName.AS_IS, families, idle_ms, host_wait_pct=92.0, unclassified_pct=0.0),)
    linears, blocks = (float8(stack="transformer_engine"),), (Blocks(name="layers", count=8, compiled=0),)
    of_trial = {"device": "cuda", "arms": arms}
    return example(linears=linears, blocks=blocks, training=Training(), tokens=256, **of_trial)


FIRES = _llama_1b_in_te(idle_ms=27.0)
SILENT = _llama_1b_in_te(idle_ms=1.2)
