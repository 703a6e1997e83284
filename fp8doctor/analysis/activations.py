"""What a forward keeps for the backward, estimated from the Linears of a job, for reports and plans alike.

Each Linear keeps its output, which a norm, an activation or attention reads, and its input, once for all that
share it. Compiled torchao layers compute their FP8 input again from what lies before it. `tests.analysis.
test_memory` and `tests.planning.test_peaks` have the error next to every measured peak.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from fp8doctor.cost import calls_of, micro_batches, routed_rows, rows_of
from fp8doctor.cost.layer import uncompiled
from fp8doctor.cost.step_cost import FUSED_QUERIES, QUERIES, has_vocabulary
from fp8doctor.facts import Facts, Linear, recorded
from fp8doctor.recipes import Recipe, recipe_of, stack_of

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


class Kept(NamedTuple):
    """What layers of one kind keep in one forward, in bytes."""

    owner: str
    """The module that the input belongs to: layers of one owner and width share it."""
    width: int
    from_attention: bool
    output: float
    input: float
    region: str | None = None
    """The checkpointed region, whose layers compute everything again."""


def owner_of(linear: Linear) -> tuple[str, str]:
    """Split the name of a layer, without LoRA's parts, into that of its module and its own."""
    name = linear.name.partition(".lora_")[0].removesuffix(".base_layer")
    owner, _, last = name.rpartition(".")
    return owner, last


def is_from_attention(owner: str, last: str) -> bool:
    return last in FROM_ATTENTION and "mlp" not in owner


def kept_by_region(layers: Iterable[Kept]) -> dict[str | None, tuple[float, float]]:
    """Add up outputs, and inputs once for all that share them, by checkpointed region."""
    outputs: dict[str | None, float] = defaultdict(float)
    inputs: dict[str | None, dict[tuple[object, ...], float]] = defaultdict(dict)
    for each in layers:
        outputs[each.region] += each.output
        key, shared = each[:3], inputs[each.region]
        shared[key] = max(shared.get(key, 0.0), each.input)
    return {region: (outputs[region], sum(inputs[region].values())) for region in outputs}


def computes_input_again(recipe: Recipe, fuses_casts: bool) -> bool:
    """Return whether the backward makes the FP8 input of a compiled layer from what lies before it."""
    return fuses_casts and not recipe.weight_gradient_in_16_bits


def kept_gib(facts: Facts) -> float | None:
    """Estimate what one micro-batch keeps, logits included; None if rows are unknown.

    Attention in the open keeps its scores too, whose size is not in the facts.
    """
    linears = facts.network.linears
    open_attention = any(
        each.get("implementation") == "eager" for each in facts.network.get("attentions", ())
    )
    if open_attention or not all(_rows(each, facts) for each in linears):
        return None
    bytes_per_logit = LOGIT_BYTES["16bit" if has_vocabulary(facts.network) else "mean"]
    heads = [each for each in linears if each.role == "head"]
    logits = sum(bytes_per_logit * (_rows(each, facts) or 0) * each.out_features for each in heads)
    kept = kept_by_region(_kept(facts))
    first: dict[str, float] = {}
    for each in linears:
        if each.role != "head" and recorded(each, "checkpointed") and each.checkpointed is not None:
            rows = _rows(each, facts) or 0
            first.setdefault(each.checkpointed, _bytes_each(each, facts) * rows * each.in_features)
    always = sum(kept.pop(None, (0.0, 0.0))) + sum(first.values())
    calls = max(1, micro_batches(facts) // (facts.get("observed.backwards") or micro_batches(facts)))
    return calls * (always + max(map(sum, kept.values()), default=0.0) + logits) / GIB


def _kept(facts: Facts) -> Iterator[Kept]:
    names = {each.name.removesuffix(".base_layer").rpartition(".")[2] for each in facts.network.linears}
    attends = has_vocabulary(facts.network) and not names.isdisjoint(QUERIES + FUSED_QUERIES)
    factor = KEPT_UNCOMPILED[uncompiled(facts)] if attends else 1.0
    for linear in facts.network.linears:
        if linear.role == "head":
            continue
        rows, compiled = _rows(linear, facts) or 0, linear.compiled is not None
        owner, last = owner_of(linear)
        bytes_each, more = _bytes_each(linear, facts), 1.0 if compiled else factor
        output = 0.0 if linear.adapter == "adapter" else bytes_each * rows * linear.out_features * more
        if linear.adapter == "adapter" and linear.dtype == "float32":  # PEFT copies the input to fp32
            owner, more = f"{owner}.lora" if compiled else linear.name, 1.0
        again = linear.use == "training" and compiled
        again = again and computes_input_again(recipe_of(linear), stack_of(linear).fuses_casts)
        kept = 0.0 if again else bytes_each * rows * linear.in_features * more
        region = linear.checkpointed if recorded(linear, "checkpointed") else None
        yield Kept(owner, linear.in_features, is_from_attention(owner, last), output, kept, region)


def _rows(linear: Linear, facts: Facts) -> int | None:
    if linear.role == "experts":
        return routed_rows(linear, facts)
    rows = rows_of(linear, facts)
    return rows * calls_of(linear, facts) if rows else None


def _bytes_each(linear: Linear, facts: Facts) -> float:
    if linear.adapter == "adapter":
        return 4.0 if linear.dtype == "float32" else 2.0
    in_fp32 = linear.multiplies_in == "float32" and facts.get("training.autocast") is None
    return 4.0 if in_fp32 and linear.adapter is None else 2.0
