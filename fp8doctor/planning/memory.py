"""The peak of memory on one GPU, by parts, and the largest batch that fits.

The peak is at the start of the backward, or in the optimizer's step if gradients are larger than activations.
Compiled, a layer keeps its output and its input in 16 bits; in torchao's FP8 the input is computed again from
what lies before it, unless the weight gradient stays in BF16. tests/planning/test_memory.py has its error.
"""

from __future__ import annotations

from msgspec import Struct

from fp8doctor.analysis.activations import GIB
from fp8doctor.analysis.fp8_weights import NEEDS_TRANSPOSED
from fp8doctor.analysis.memory import USABLE
from fp8doctor.gpus import GpuSpec
from fp8doctor.planning.conversion import is_converted
from fp8doctor.planning.options import OPTIMIZERS, Options
from fp8doctor.planning.share import Layer, Share
from fp8doctor.recipes import STACKS, Recipe

LOGIT_BYTES = 14.0
"""Per logit: 16 bits from the head, and in fp32 the copy, its logarithms and their gradient."""

UNCOMPILED = 1.45
"""Bytes that uncompiled blocks of transformers keep / compiled ones: norms and activations in fp32, op by op
(h200-llama_8b: 62.98 and 47.98 GiB with logits)."""


class Peak(Struct, frozen=True):
    """What a GPU holds at the peak, in GiB."""

    weights: float
    gradients: float
    optimizer: float
    fp8_copies: float
    activations: float
    """At the start of the backward, logits included."""

    @property
    def gib(self) -> float:
        return self.weights + self.optimizer + self.fp8_copies + max(self.gradients, self.activations)


def peak_of(share: Share, options: Options, gpu: GpuSpec, recipe: Recipe | None, *, compiled: bool) -> Peak:
    """Estimate the peak in BF16 or with a recipe."""
    bytes_of = OPTIMIZERS[options.optimizer]
    weights = share.parameters.all
    states = trained = share.trained.all
    if options.ranks > 1 and options.sharding != "ddp":
        states = share.trained.sharded(options)
    if options.ranks > 1 and options.sharding == "fsdp":
        two_blocks = 2 * share.parameters.all / share.blocks
        weights, trained = share.parameters.sharded(options) + two_blocks, share.trained.sharded(options)
    copies = 0.0
    if recipe is not None and STACKS[recipe.stack].keeps_copies:
        each = 2 if gpu.compute_capability in NEEDS_TRANSPOSED else 1
        converted = (layer for layer in share.layers if is_converted(layer, recipe))
        copies = each * sum(layer.parameters * layer.count for layer in converted)
    return Peak(
        2.0 * weights / GIB,
        bytes_of.gradient * trained / GIB,
        bytes_of.state * states / GIB,
        copies / GIB,
        activations(share, options, recipe, compiled=compiled) / GIB,
    )


def activations(share: Share, options: Options, recipe: Recipe | None, *, compiled: bool) -> float:
    """Bytes that the forward keeps for the backward, of all micro-batches in flight."""
    outputs = inputs = logits = 0.0
    widest: dict[tuple[str, int], tuple[float, int]] = {}
    for layer in share.layers:
        k, n = layer.linear.in_features, layer.linear.out_features
        if layer.linear.role == "head":
            logits += LOGIT_BYTES * layer.rows * n
            continue
        if layer.linear.adapter != "adapter":
            outputs += 2.0 * layer.rows * layer.count * n
        again = computed_again(layer, recipe)
        key = (layer.owner.rpartition(".")[2] + ("out" if again is None else ""), k)
        bytes_kept = 0.0 if again else 2.0 * layer.rows * k
        widest[key] = max(widest.get(key, (0.0, 0)), (bytes_kept, layer.count))
    inputs = sum(kept * count for kept, count in widest.values())
    kept = (outputs + inputs) * (1.0 if compiled else UNCOMPILED)
    hidden = 2.0 * options.tokens * share.hidden * share.blocks / options.tp
    if options.checkpointing == "full":
        kept = hidden + kept / share.blocks
    elif options.checkpointing == "selective":
        kept = hidden + outputs / 2
    return kept * min(options.pp, options.accumulate) + logits


def computed_again(layer: Layer, recipe: Recipe | None) -> bool | None:
    """Return whether FP8 keeps no input of a layer; None if attention makes it and keeps it."""
    if layer.from_attention:
        return None
    if recipe is None or recipe.weight_gradient_in_16_bits or not STACKS[recipe.stack].fuses_casts:
        return False
    return is_converted(layer, recipe)


MOST_SAMPLES = 1 << 16


def largest_batch(
    share: Share, options: Options, gpu: GpuSpec, recipe: Recipe | None, *, compiled: bool
) -> int:
    """Find the most samples of a micro-batch that fit; 0 if one does not."""
    peak = peak_of(share, options, gpu, recipe, compiled=compiled)
    room = USABLE * gpu.memory_gib - (peak.weights + peak.optimizer + peak.fp8_copies)
    if room < peak.gradients or room <= 0 or peak.activations <= 0:
        return 0
    return min(MOST_SAMPLES, int(room / (peak.activations / options.batch)))
