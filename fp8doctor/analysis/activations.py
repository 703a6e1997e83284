"""What a forward keeps for the backward, estimated from the Linears of a job.

Each Linear keeps its output, which a norm, an activation or attention reads, and its input, once for all that
share it. Compiled torchao layers compute their FP8 input again from what lies before it. `tests.analysis.
test_memory` has the error next to every measured peak.
"""

from __future__ import annotations

from collections import defaultdict

from fp8doctor.cost import calls_of, micro_batches, routed_rows, rows_of
from fp8doctor.cost.step_cost import FUSED_QUERIES, QUERIES, has_vocabulary, uncompiled
from fp8doctor.facts import Facts, Linear, recorded
from fp8doctor.recipes import recipe_of, stack_of

GIB = 2**30

LOGIT_BYTES = {"16bit": 14.0, "mean": 2.0}
"""Per logit of a cross entropy: 16 bits from the head, and in fp32 the copy, its logarithms and their
gradient; of an output without one."""

KEPT_UNCOMPILED = {"eager transformers": 1.45, "eager": 1.25}
"""Bytes that uncompiled blocks keep / compiled ones: of transformers (h200-llama_8b: 62.98 and 47.98 GiB with
logits), of other attention (h200-decoder_454m and h200-decoder_468m: 1.19 and 1.20). A chain of Linears
without attention keeps the same in both (h200-wide_head, h200-vit_large)."""

FROM_ATTENTION = ("o_proj", "out_proj", "wo", "dense", "c_proj", "proj", "to_out", "linear_proj", "out", "o")
"""Last part of the name of the layer behind attention, which keeps its output itself."""


def kept_gib(facts: Facts) -> float | None:
    """Estimate what one micro-batch keeps, logits included; None if rows are unknown.

    Attention in the open keeps its scores too, whose size is not in the facts.
    """
    if any(each.get("implementation") == "eager" for each in facts.network.get("attentions", ())):
        return None
    of_region: dict[str | None, dict[tuple[str, int, bool], float]] = defaultdict(dict)
    outputs: dict[str | None, float] = defaultdict(float)
    inputs: dict[str, float] = {}
    logits, factor = 0.0, _uncompiled(facts)
    for linear in facts.network.linears:
        rows = _rows(linear, facts)
        if rows is None:
            return None
        k, n = linear.in_features, linear.out_features
        if linear.role == "head":
            logits += LOGIT_BYTES["16bit" if has_vocabulary(facts.network) else "mean"] * rows * n
            continue
        owner, _, last = linear.name.partition(".lora_")[0].removesuffix(".base_layer").rpartition(".")
        region = linear.checkpointed if recorded(linear, "checkpointed") else None
        more = 1.0 if linear.compiled is not None else factor
        bytes_each = 4.0 if _in_fp32(linear, facts) else 2.0
        if linear.adapter != "adapter":
            outputs[region] += bytes_each * rows * n * more
        if linear.adapter == "adapter" and linear.dtype == "float32":  # PEFT copies the input to fp32
            owner, bytes_each, more = (
                f"{owner}.lora" if linear.compiled is not None else linear.name,
                4.0,
                1.0,
            )
        key = (owner, k, last in FROM_ATTENTION and "mlp" not in owner)
        kept = 0.0 if _computed_again(linear) else bytes_each * rows * k * more
        of_region[region][key] = max(of_region[region].get(key, 0.0), kept)
        if region is not None:
            inputs.setdefault(region, bytes_each * rows * k)
    whole = {each: outputs[each] + sum(of_region[each].values()) for each in of_region}
    kept_always = whole.pop(None, 0.0) + sum(inputs.values())
    calls = max(1, micro_batches(facts) // (facts.get("observed.backwards") or micro_batches(facts)))
    return calls * (kept_always + max(whole.values(), default=0.0) + logits) / GIB


def _rows(linear: Linear, facts: Facts) -> int | None:
    """Count the rows of all calls in one forward."""
    if linear.role == "experts":
        return routed_rows(linear, facts)
    rows = rows_of(linear, facts)
    return rows * calls_of(linear, facts) if rows else None


def _in_fp32(linear: Linear, facts: Facts) -> bool:
    return (
        linear.multiplies_in == "float32"
        and facts.get("training.autocast") is None
        and linear.adapter is None
    )


def _uncompiled(facts: Facts) -> float:
    names = {each.name.removesuffix(".base_layer").rpartition(".")[2] for each in facts.network.linears}
    how = uncompiled(facts)
    attends = has_vocabulary(facts.network) and not names.isdisjoint(QUERIES + FUSED_QUERIES)
    return KEPT_UNCOMPILED[how] if attends else 1.0


def _computed_again(linear: Linear) -> bool:
    """Return whether the backward makes an FP8 input from what lies before the layer."""
    compiled_fp8 = linear.use == "training" and linear.compiled is not None and stack_of(linear).fuses_casts
    return compiled_fp8 and not recipe_of(linear).weight_gradient_in_16_bits
