"""Too few tokens in a step

Looks at: the tokens of one micro-batch (batch x sequence), when the batch is yours, and the shapes
of the FP8 layers.

Why it costs time. The rows of every GEMM are the tokens. With a few hundred of them a GEMM is over
before the GPU is full: its time is that of reading the weight, or of launching a kernel, and FP8
tensor cores have nothing to speed up. The price of FP8 hardly falls with the tokens: the weight is
scaled and cast in full twice a step, and each layer launches some nine kernels more, compiled.

What to do. More tokens in a micro-batch: a larger batch, longer or packed sequences, and fewer
steps of accumulation in exchange, which trains the same.

    per_device_train_batch_size=1, gradient_accumulation_steps=32    # before: 32 x 256 tokens
    per_device_train_batch_size=32, gradient_accumulation_steps=1    # after: 1 x 8192 tokens

It fires when all FP8 layers together lose for sure, and more tokens would make them faster by 3 %.
For sure is by a margin of 25 % where the layers are modelled. Of layers that were timed alone it is
by 3 %, with no more of their casts than a step pays at the least (45 %). Where no number of tokens
makes them faster, the layers are too small (SHP002). A whole step in FP8 that was timed and is not
slower than the best BF16 shows that the tokens suffice. The numbers are of the layers: a step that
waits for its host, or for data, needs more than such a number of tokens. A batch that would have to
grow more than 16 times is not told to: FP8 is better left off.

Evidence: `h200-few_tokens` has 256 tokens in a micro-batch, and FP8 runs at 0.59x of BF16.
https://github.com/pytorch/ao/issues/572 https://github.com/axolotl-ai-cloud/axolotl/issues/3969
"""

from __future__ import annotations

from fp8doctor.analysis.layer_gain import gains
from fp8doctor.analysis.losing_layers import MOST_GROWTH, Crossing, crossing
from fp8doctor.analysis.treatment_table import MORE_TOKENS
from fp8doctor.diagnosis.treatments import stay_in_bf16
from fp8doctor.facts import Facts, Linear, Network, Workload
from fp8doctor.finding import Finding, NotApplicable, Treatment
from fp8doctor.registry import check


@check("SHP003", "too-few-tokens", area="shapes", severity="warning", changes_fp8=True)
def too_few_tokens(facts: Facts) -> Finding | NotApplicable | None:
    if facts.workload.batch_source != "given":
        return NotApplicable(reason="the batch is not the user's")
    if not gains(facts):
        return NotApplicable(
            reason="no FP8 layer whose shape, recipe and tokens are known, on a GPU with FP8 and a datasheet"
        )
    found = crossing(facts)
    if found is None:
        return None
    tokens = facts.workload.tokens
    how = "timed alone" if found.measured else "modelled"
    where = "in a micro-batch" if facts.workload.accumulate > 1 else "a step"
    batch = global_batch(facts.workload, found)
    return Finding(
        title=f"{tokens:,} tokens {where} are too few for the FP8 layers; from about "
        f"{found.tokens:,} on they gain",
        explanation=f"GEMMs and compiled casts of the FP8 layers run at {found.speedup_now:.2f}x of BF16 at "
        f"best with these tokens ({how} on {found.gpu}), and at {found.speedup_then:.2f}x with "
        f"{found.tokens:,} (modelled). A step that waits for its host, or for anything else "
        "outside of them, gains less.",
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
            summary=f"{found.tokens:,} tokens in a micro-batch" + (f"; {batch}" if batch else ""),
            code=more_tokens(facts.workload, found),
        )
        if growth(facts.workload, found) <= MOST_GROWTH
        else stay_in_bf16(facts, f"FP8 wants {growth(facts.workload, found):g} times the batch"),
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
    """Say what these lines make of the batch of one step of the optimizer; empty where it stays."""
    change = growth(workload, found)
    return (
        ""
        if change == 1
        else f"the global batch {'grows' if change > 1 else 'shrinks'} to {round(change, 2):g} times its "
        "size, which changes the training"
    )


def growth(workload: Workload, found: Crossing) -> float:
    """Compute how many times larger the batch of one step of the optimizer becomes."""
    times, fewer = _changed(workload, found)
    return times * fewer / workload.accumulate


def _changed(workload: Workload, found: Crossing) -> tuple[int, int]:
    """Compute how many times larger the micro-batch becomes, and how many of them make a step then."""
    times = found.tokens // (workload.tokens or 1)
    return times, max(1, workload.accumulate // times)


def _decoder(batch_size: int) -> Facts:
    layer = Linear(
        name="layers.0.up_proj",
        stack="torchao",
        use="training",
        recipe="tensorwise",
        in_features=2048,
        out_features=8192,
        requires_grad=True,
        role="body",
        flops_share_pct=100.0,
    )
    workload = Workload(
        batch_source="given",
        batch_size=batch_size,
        sequence_length=256,
        tokens=256 * batch_size,
        accumulate=1,
    )
    return Facts(network=Network(linears=(layer,)), workload=workload)


SICK = _decoder(batch_size=1)
HEALTHY = _decoder(batch_size=64)
