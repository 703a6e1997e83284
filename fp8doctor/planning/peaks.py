"""The peak of memory on one GPU: at the start of the backward, or in the optimizer's step if gradients are
larger than activations. tests/planning/test_peaks.py has its error."""

from __future__ import annotations

from fp8doctor.analysis.activations import GIB, LOGIT_BYTES, kept_by_region, kept_of
from fp8doctor.analysis.fp8_weights import NEEDS_TRANSPOSED
from fp8doctor.analysis.memory import Memory, Peak
from fp8doctor.gpus import GpuSpec
from fp8doctor.planning.job_options import OPTIMIZERS, Options
from fp8doctor.planning.share import Share, is_converted
from fp8doctor.planning.step_time import call_of
from fp8doctor.recipes import STACKS, TRANSFORMER_ENGINE, Recipe


def peak_of(share: Share, options: Options, gpu: GpuSpec, stack: str, recipe: Recipe | None) -> Peak:
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
        if options.checkpointing == "full" and options.accumulate == 1:
            copies /= share.blocks  # cast again with each block; several micro-batches keep them
    held = Memory(
        2.0 * weights / GIB,
        bytes_of.gradient * trained / GIB,
        bytes_of.state * states / GIB,
        copies / GIB,
        linear_inputs=None,
    )
    return Peak(held, activations(share, options, stack, recipe) / GIB)


def activations(share: Share, options: Options, stack: str, recipe: Recipe | None) -> float:
    """Bytes that the forward keeps for the backward, of all micro-batches in flight.

    Sequence parallelism scatters what a layer with divided inputs adds up. Of an input that it gathered,
    Transformer Engine keeps the rank's part and gathers it again, DTensor keeps all.
    """
    logits, kept_layers = 0.0, []
    for layer in share.layers:
        linear = call_of(layer, options, recipe, stack=stack).linear
        (part_k, part_n), k, n = layer.sides, linear.in_features, linear.out_features
        if linear.role == "head":
            logits += 0.0 if options.fused_loss else LOGIT_BYTES["16bit"] * layer.rows * n
            continue
        sides = part_k if stack == TRANSFORMER_ENGINE.name else k, part_n if k == part_k else n
        kept_layers.append(kept_of(linear, layer.rows * layer.count, sides=sides))
    outputs, inputs = kept_by_region(kept_layers).get(None, (0.0, 0.0))
    kept = outputs + inputs
    hidden = 2.0 * options.tokens * share.hidden * share.blocks / options.tp
    if options.checkpointing == "full":
        kept = hidden + kept / share.blocks
    elif options.checkpointing == "selective":
        kept = hidden + outputs / 2
    return kept * min(options.pp, options.accumulate) + logits
