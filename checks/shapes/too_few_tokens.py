"""Too few tokens in a step

The tokens of a micro-batch (batch x sequence) are the rows of every matmul. With a few hundred, a matmul ends
before the GPU is full, and FP8 cannot speed it up. Its casts hardly get cheaper: the whole weight is cast
twice a step, and each layer launches about nine more kernels, compiled. With 256 tokens, one job ran at 0.59x
of BF16 (`h200-few_tokens`).

    args = TrainingArguments(per_device_train_batch_size=1, gradient_accumulation_steps=32)  # before

    from transformers import TrainingArguments
    args = TrainingArguments(per_device_train_batch_size=32, gradient_accumulation_steps=1)  # after

Use a larger batch, longer or packed sequences, and fewer accumulation steps in exchange, so training stays
the same. If the batch had to grow more than 16 times, the advice is BF16. fp8doctor needs a batch of yours:
ignore it if your real batch is larger. The layers must be 25% slower by the estimate. A step that waits for
the host or for data needs more tokens than the title says. If no number of tokens helps, see SHP002.
https://github.com/pytorch/ao/issues/572
https://github.com/axolotl-ai-cloud/axolotl/issues/3969
"""

from fp8doctor import kit


@kit.check("SHP003", "too-few-tokens", severity="warning", changes_fp8=True)
def too_few_tokens(facts: kit.Facts) -> kit.Finding | kit.NotApplicable | None:
    workload = facts.workload
    if workload.batch_source != "given":
        return kit.NotApplicable(reason="the batch is not the user's")
    if not kit.layer_gain.gains(facts):
        return kit.NotApplicable(reason="no FP8 layer with known shape, recipe, tokens and GPU datasheet")
    found = kit.layer_gain.crossing(facts)
    gpu = kit.cost.modelled_gpu(facts)
    if found is None or gpu is None:
        return None
    enough, now, then = found
    tokens, per = workload.tokens or 1, "micro-batch" if workload.accumulate > 1 else "step"
    return kit.Finding(
        title=f"{tokens:,} tokens per {per} are too few for the FP8 layers; they gain from about {enough:,}",
        explanation=f"Matmuls and compiled casts of the FP8 layers run at {now:.2f}x of BF16 "
        f"with these tokens, and at {then:.2f}x with {enough:,} (estimated for "
        f"{gpu.name}). A step that waits for the host, or for anything else outside them, gains less.",
        evidence={
            "tokens": tokens,
            "crossing_tokens": enough,
            "speedup_now": round(now, 3),
            "speedup_then": round(then, 3),
        },
        treatment=kit.treatments.more_tokens(facts, enough)
        or kit.stay_in_bf16(facts, f"FP8 needs {enough // tokens:g} times the batch (estimated)"),
    )


def _decoder(batch_size: int) -> kit.Facts:
    layer = kit.float8(in_features=2048, out_features=8192)
    batch = {"batch_source": "given", "batch_size": batch_size, "sequence_length": 256, "accumulate": 1}
    return kit.example(linears=(layer,), tokens=256 * batch_size, **batch)


FIRES = _decoder(batch_size=1)
SILENT = _decoder(batch_size=64)
