"""Too few tokens in a step

What it finds. With the tokens of one micro-batch (batch x sequence), the FP8 layers together are slower than
in BF16; with more tokens they would gain.

Why it matters. The tokens are the rows of every matmul. With a few hundred, a matmul ends before the GPU is
full. Reading the weight or launching the kernel takes most of its time, and FP8 tensor cores cannot speed
that up. FP8's own cost hardly falls: the whole weight is scaled and cast twice a step, and each layer
launches about nine more kernels, compiled. With 256 tokens, one job ran at 0.59x of BF16 on an H200.

Fix. Put more tokens into a micro-batch: a larger batch, longer or packed sequences. Use fewer accumulation
steps in exchange, so training stays the same.

    args = TrainingArguments(per_device_train_batch_size=1, gradient_accumulation_steps=32)  # before

    from transformers import TrainingArguments
    args = TrainingArguments(per_device_train_batch_size=32, gradient_accumulation_steps=1)  # after

When to ignore it. If your real batch is larger.

How it is detected, and limits. fp8doctor needs a batch of yours. The layers must be slower by 25% when
estimated, or by 3% when timed alone, with 45% of their casts (the least a step pays). More tokens must gain
3%. If no number of tokens helps, see SHP002. If the batch had to grow more than 16 times, the advice is BF16.
The numbers are the layers'; a step that waits for the host or for data needs more tokens.

References. `h200-few_tokens`. https://github.com/pytorch/ao/issues/572
https://github.com/axolotl-ai-cloud/axolotl/issues/3969
"""

from __future__ import annotations

from fp8doctor.analysis.layer_gain import gains
from fp8doctor.analysis.losing_layers import MOST_GROWTH, Crossing, crossing
from fp8doctor.analysis.treatment_table import MORE_TOKENS
from fp8doctor.diagnosis.leaving_fp8 import stay_in_bf16
from fp8doctor.facts import Facts, Workload
from fp8doctor.facts.examples import example, float8
from fp8doctor.finding import Finding, NotApplicable, Treatment
from fp8doctor.registry import check


@check("SHP003", "too-few-tokens", area="shapes", severity="warning", changes_fp8=True)
def too_few_tokens(facts: Facts) -> Finding | NotApplicable | None:
    if facts.workload.batch_source != "given":
        return NotApplicable(reason="the batch is not the user's")
    if not gains(facts):
        return NotApplicable(reason="no FP8 layer with known shape, recipe, tokens and GPU datasheet")
    found = crossing(facts)
    if found is None:
        return None
    tokens = facts.workload.tokens
    how = "timed alone" if found.measured else "estimated"
    where = "per micro-batch" if facts.workload.accumulate > 1 else "per step"
    batch = global_batch(facts.workload, found)
    return Finding(
        title=f"{tokens:,} tokens {where} are too few for the FP8 layers; they gain from about "
        f"{found.tokens:,}",
        explanation=f"Matmuls and compiled casts of the FP8 layers run at {found.speedup_now:.2f}x of BF16 "
        f"at best with these tokens ({how}, {found.gpu}), and at {found.speedup_then:.2f}x with "
        f"{found.tokens:,} (estimated). A step that waits for the host, or for anything else outside them, "
        "gains less.",
        evidence={
            "tokens": tokens,
            "batch_size": facts.workload.batch_size,
            "sequence_length": facts.workload.sequence_length,
            "crossing_tokens": found.tokens,
            "speedup_now": round(found.speedup_now, 3),
            "speedup_then": round(found.speedup_then, 3),
            "timed_alone": found.measured,
        },
        treatment=Treatment(
            name=MORE_TOKENS,
            summary=f"use {found.tokens:,} tokens per micro-batch" + (f"; {batch}" if batch else ""),
            code=more_tokens(facts.workload, found),
        )
        if growth(facts.workload, found) <= MOST_GROWTH
        else stay_in_bf16(facts, f"FP8 needs {growth(facts.workload, found):g} times the batch"),
    )


def more_tokens(workload: Workload, found: Crossing) -> str:
    """Write the lines that change batch and accumulation."""
    times, fewer = _changed(workload, found)
    batch, accumulate = workload.batch_size or 1, workload.accumulate
    lines = [f"batch_size = {batch * times}   # from {batch}, or longer sequences: {found.tokens:,} tokens"]
    if accumulate > 1:
        lines.append(f"accumulate = {fewer}   # from {accumulate}")
    return "\n".join(lines)


def global_batch(workload: Workload, found: Crossing) -> str:
    """Say how these lines change the batch per optimizer step; empty if they do not."""
    change = growth(workload, found)
    return (
        ""
        if change == 1
        else f"the global batch {'grows' if change > 1 else 'shrinks'} to {round(change, 2):g} times its "
        "size, which changes the training"
    )


def growth(workload: Workload, found: Crossing) -> float:
    """Compute how many times larger the batch per optimizer step becomes."""
    times, fewer = _changed(workload, found)
    return times * fewer / workload.accumulate


def _changed(workload: Workload, found: Crossing) -> tuple[int, int]:
    """Compute how many times larger the micro-batch becomes, and how many then make a step."""
    times = found.tokens // (workload.tokens or 1)
    return times, max(1, workload.accumulate // times)


def _decoder(batch_size: int) -> Facts:
    layer = float8(in_features=2048, out_features=8192)
    batch = {"batch_source": "given", "batch_size": batch_size, "sequence_length": 256, "accumulate": 1}
    return example(linears=(layer,), tokens=256 * batch_size, **batch)


FIRES = _decoder(batch_size=1)
SILENT = _decoder(batch_size=64)
