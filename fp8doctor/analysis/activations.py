"""What a forward keeps for the backward, by the Linears of a job: each keeps its output, and its input once
for all that share it. tests/analysis/test_memory.py and tests/planning/test_peaks.py have the error."""

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from fp8doctor.analysis.layers import computes_forward_in_fp8
from fp8doctor.cost.layer import uncompiled
from fp8doctor.cost.matmuls import micro_batches
from fp8doctor.cost.step_cost import call_of, has_vocabulary, queries, unmodelled
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


class Kept(NamedTuple):
    """What a layer, or all of its kind, keeps in one forward, in bytes."""

    owner: str
    """The module that the input belongs to: layers of one owner and width share it."""
    width: int
    from_attention: bool
    output: float
    input: float
    region: str | None
    """The checkpointed region, whose layers compute everything again."""


def owner_of(linear: Linear) -> tuple[str, str]:
    """Split the name of a layer, without LoRA's parts, into that of its module and its own."""
    owner, _, last = linear.layer.rpartition(".")
    return owner, last


def kept_of(linear: Linear, rows: float, *, bytes_each: float = 2.0, sides: tuple[float, float]) -> Kept:
    """Tell what a layer keeps of so many rows; ``sides`` are the features of input and output that stay here.

    Compiled, FP8 computes an input again from what lies before it, unless the weight gradient is in 16 bits.
    """
    owner, last = owner_of(linear)
    adapter, compiled = linear.adapter == "adapter", linear.compiled is not None
    from_attention = last in FROM_ATTENTION and "mlp" not in owner
    if adapter and linear.dtype == "float32":  # PEFT copies the input to fp32
        owner = f"{owner}.lora" if compiled else linear.name
    again = linear.use == "training" and compiled and stack_of(linear).fuses_casts
    again = again and not recipe_of(linear).weight_gradient_in_16_bits
    output = 0.0 if adapter else bytes_each * rows * sides[1]
    region = linear.checkpointed if recorded(linear, "checkpointed") else None
    kept = 0.0 if again else bytes_each * rows * sides[0]
    return Kept(owner, linear.in_features, from_attention, output, kept, region)


def kept_by_region(layers: Iterable[Kept]) -> dict[str | None, tuple[float, float]]:
    """Add up outputs, and inputs once for all that share them, by checkpointed region."""
    outputs: dict[str | None, float] = defaultdict(float)
    inputs: dict[str | None, dict[tuple[object, ...], float]] = defaultdict(dict)
    for each in layers:
        outputs[each.region] += each.output
        key, shared = each[:3], inputs[each.region]
        shared[key] = max(shared.get(key, 0.0), each.input)
    return {region: (outputs[region], sum(inputs[region].values())) for region in outputs}


def kept_gib(facts: Facts) -> float | None:
    """Estimate what one micro-batch keeps, logits included; None if rows are unknown or nothing is trained.

    Attention in the open keeps its scores too, a convolution its images and Mamba its states: the facts lack
    their sizes.
    """
    linears, attentions = facts.network.linears, facts.network.get("attentions", ())
    calls = {each.name: call_of(each, facts) for each in linears}
    rows = {name: each.rows * each.count for name, each in calls.items()}
    in_the_open = any(each.get("implementation") == "eager" for each in attentions)
    trains = all(rows.values()) and facts.network.trainable_parameters
    if in_the_open or not trains or unmodelled(facts.network):
        return None
    bytes_per_logit = LOGIT_BYTES["16bit" if has_vocabulary(facts.network) else "mean"]
    logits = sum(
        bytes_per_logit * rows[each.name] * each.out_features for each in linears if each.role == "head"
    )
    kept_layers, begins = [], dict[str, tuple[int, float]]()
    attends = has_vocabulary(facts.network) and bool(queries(facts.network))
    factor, autocast = KEPT_UNCOMPILED[uncompiled(facts)] if attends else 1.0, facts.get("training.autocast")
    for linear in linears:
        if linear.role == "head":
            continue
        adapter_in_fp32 = linear.adapter == "adapter" and linear.dtype == "float32"
        in_fp32 = linear.adapter is None and linear.multiplies_in == "float32" and not autocast
        bytes_each = 4.0 if adapter_in_fp32 or in_fp32 else 2.0
        sides = linear.in_features, linear.out_features
        more = bytes_each if adapter_in_fp32 or linear.compiled is not None else bytes_each * factor
        kept_layers.append(kept_of(linear, rows[linear.name], bytes_each=more, sides=sides))
        region = kept_layers[-1].region if linear.adapter != "adapter" else None
        if region:  # its input is that of the first layer with the most rows
            entry = rows[linear.name], bytes_each * rows[linear.name] * sides[0]
            begins[region] = max(begins.get(region, entry), entry, key=lambda each: each[0])
    kept = kept_by_region(kept_layers)
    always = sum(kept.pop(None, (0.0, 0.0))) + sum(size for _, size in begins.values())
    times = max(1, micro_batches(facts) // (facts.get("observed.backwards") or micro_batches(facts)))
    return times * (always + max(map(sum, kept.values()), default=0.0) + logits) / GIB


def dequantized_gib(facts: Facts) -> float:
    """Add up the 16-bit copies of stored weights that autograd keeps for the gradients of inputs.

    A plain float8 weight is converted in the forward. Compiled, it is converted again in the backward; the
    layers of bitsandbytes, transformers and torchao convert theirs again in a backward of their own.
    """
    kept = defaultdict[str | None, float](float)
    for each in facts.network.linears if facts.network.trainable_parameters else ():
        again = each.stack != "torch" or each.compiled is not None or computes_forward_in_fp8(each)
        if each.use == "storage" and not again:
            kept[each.get("checkpointed")] += 2.0 * each.in_features * each.out_features * each.gemms / GIB
    return kept.pop(None, 0.0) + max(kept.values(), default=0.0)
