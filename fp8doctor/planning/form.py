"""One GPU's share of a job in BF16 or in a recipe: its layers as they run, its step by parts, and its peak.

Ranks of tensor parallelism are next to each other on a host, then those of experts, context and data. The
peak is at the start of the backward, or in the optimizer's step if gradients are larger than activations.
tests/planning/test_peaks.py has its error."""

from typing import Literal, get_args

from msgspec import Struct
from msgspec.structs import replace

from fp8doctor.analysis.activations import GIB, LOGIT_BYTES, kept_by_region, kept_of
from fp8doctor.analysis.layers import is_multiplied
from fp8doctor.analysis.memory import Peak, copies_on
from fp8doctor.cost.layer import Call
from fp8doctor.cost.step_cost import LOSS_BYTES, OPTIMIZER_BYTES, Work, attention, logits, priced, with_each
from fp8doctor.gpus import GpuSpec
from fp8doctor.planning.job_options import OPTIMIZERS, Amount, Layer, Options, Share
from fp8doctor.recipes import STACKS, TRANSFORMER_ENGINE, Recipe

Part = Literal[
    "matmuls",
    "casts",
    "attention",
    "head",
    "experts",
    "pointwise",
    "communication",
    "optimizer",
    "host",
    "bubble",
]

EFFECTIVE = OPTIMIZER_BYTES / OPTIMIZERS["adamw"].moved
"""Effective bytes of a fused AdamW step / the bytes it moves."""

RECOMPUTED = {"none": 0.0, "selective": 0.5, "full": 1.0}
"""Share of the matmuls that the backward repeats."""

NETWORK_GB_S = 50.0
"""Of one GPU's network adapter, one way: 400 Gbit/s, as in NVIDIA's DGX H100."""

LINK_EFFICIENCY = 0.75
"""Share of a link's rate that a large collective reaches. A convention until it is measured."""

HIDDEN = 0.9
"""Share of the computing time behind which FSDP's and DDP's communication can hide. A convention until it is
measured."""


def inside_ms(share: Share, options: Options, gpu: GpuSpec, busy_ms: float, *, overlaps: bool) -> float:
    """Model the communication inside of one micro-batch that ``busy_ms`` of computing does not hide.

    Transformer Engine ``overlaps``: it cuts matmuls into a part for each rank of tensor parallelism and sends
    the next part meanwhile (``ub_overlap_ag`` and ``ub_overlap_rs``, Megatron's ``tp_comm_overlap``), so one
    part's remains. That of torch is asynchronous only if asked.
    """
    times = 12 if options.checkpointing == "full" else 8  # gathers and scatters of a block, both ways
    tensor = times * share.blocks * _ring(2.0 * options.tokens * share.hidden, options.tp, 1, gpu)
    inside = tensor / (options.tp if overlaps else 1) + experts_ms(share, options, gpu)
    network = share.facts.network
    part = (network.get("key_value_heads") or 1) / (network.get("heads") or 1)
    keys = 2 * 2.0 * options.batch * options.seq * share.hidden * part / options.tp
    context = 3 * share.blocks * _ring(keys, options.cp, options.tp * options.ep, gpu)
    return inside + max(0.0, context - HIDDEN * busy_ms)


def experts_ms(share: Share, options: Options, gpu: GpuSpec) -> float:
    """Time the exchange of tokens before and behind the experts, forward and backward.

    In 16 bits, whatever the experts' recipe. Sequence parallelism leaves each rank its part of the tokens.
    """
    sent = sum(
        2.0 * each.rows * each.count * share.hidden
        for each in share.layers
        if each.linear.role == "experts" and each.linear.in_features == share.hidden
    )
    sent, ranks, of_host = sent / options.tp, options.ep, max(1, gpu.link_gpus // options.tp)
    if ranks <= of_host:
        return 4 * _ring(sent, ranks, options.tp, gpu)
    own_adapter = NETWORK_GB_S * LINK_EFFICIENCY * 1e6  # for what leaves the host
    return 4 * sent * (ranks - of_host) / ranks / own_adapter


def of_ranks_ms(amount: Amount, each: float, options: Options, gpu: GpuSpec) -> float:
    """Time one gather or scatter of all parameters over the ranks that share them."""
    return _ring(each * amount.dense, options.ranks, options.tp, gpu) + _ring(
        each * amount.experts, options.ranks // options.ep, options.tp * options.ep, gpu
    )


def _ring(bytes_moved: float, ranks: int, inner: int, gpu: GpuSpec) -> float:
    """Time a gather or scatter over ranks that are ``inner`` GPUs apart.

    Beyond the GPUs that links join, the ranks among them use their adapters together.
    """
    if ranks == 1:
        return 0.0
    of_host = max(1, gpu.link_gpus // inner)
    rate = gpu.link_gb_s if ranks <= of_host else min(gpu.link_gb_s, NETWORK_GB_S * of_host)
    return bytes_moved * (ranks - 1) / ranks / (rate * LINK_EFFICIENCY * 1e6)


def gathers_fp8(recipe: Recipe | None, options: Options) -> bool:
    """Return whether FSDP gathers weights in FP8: ``enable_fsdp_float8_all_gather`` of torchao."""
    sharded = options.sharding == "fsdp" and options.ranks > 1
    return sharded and recipe is not None and (recipe.stack, recipe.name) == ("torchao", "tensorwise")


def weights_cast(recipe: Recipe, options: Options) -> float:
    """Return the share of its weights that a GPU casts in one micro-batch.

    A sharded gather in FP8 leaves each rank its part. Transformer Engine keeps the cast weights of the first
    micro-batch for the others, if ``is_first_microbatch`` says which it is, as Megatron does.
    """
    if gathers_fp8(recipe, options):
        return 1 / options.ranks
    return 1 / options.accumulate if STACKS[recipe.stack].keeps_copies else 1.0


class Step(Struct, frozen=True):
    """One step, with its parts in ms."""

    ms: float
    parts: dict[Part, float]
    in_balance: bool
    """Whether host and GPU take about as long, so that the step takes longer than either."""


class Form(Struct, frozen=True):
    """The compiled job on one kind of GPU."""

    share: Share
    options: Options
    gpu: GpuSpec
    stack: str
    recipe: Recipe | None = None
    """None in BF16."""
    scale: float = 1.0
    """A measured BF16 step / the estimated one."""

    def converts(self, layer: Layer) -> bool:
        """Return whether a conversion with the recipe takes the layer."""
        linear, recipe = layer.linear, self.recipe
        if recipe is None:
            return False
        if linear.role == "experts":  # torchao's converter leaves them out, and rowwise experts are slower
            taken = STACKS[recipe.stack].own_kernels or recipe.name == "mxfp8"
        else:
            taken = is_multiplied(linear, layer.rows)
        return taken and not (linear.in_features % recipe.multiple or linear.out_features % recipe.multiple)

    def call(self, layer: Layer) -> Call:
        own, is_head = self.recipe if self.converts(layer) else None, layer.linear.role == "head"
        linear = replace(
            layer.linear,
            compiled=None if is_head else "",
            dtype="bfloat16",
            use="training" if own else "none",
            stack=self.stack,
            recipe=own.name if own else None,
            features={},
        )
        return replace(
            layer,
            linear=linear,
            recomputed=0.0 if is_head else RECOMPUTED[self.options.checkpointing],
            weights_cast=weights_cast(own, self.options) if own else 1.0,
        )

    def work(self) -> Work:
        """Describe the step without communication."""
        share, options, over = self.share, self.options, self.options.tp * self.options.pp
        region = "" if options.checkpointing == "full" else None
        facts = with_each(share.facts, lambda each: replace(each, checkpointed=region))
        held = share.trained.all if options.sharding == "ddp" else share.trained.sharded(options)
        return Work(
            calls=tuple(map(self.call, share.layers)),
            attention=tuple((flops / over, efficiency) for flops, efficiency in attention(facts)),
            loss_bytes=LOSS_BYTES["fp32"] * logits(facts) / options.tp,
            optimizer_bytes=EFFECTIVE * OPTIMIZERS[options.optimizer].moved * held,
            accumulate=options.accumulate,
        )

    def step(self) -> Step:
        """Model the step. Raises `NoNumbers`."""
        found = priced(self.work(), self.gpu)
        parts: dict[Part, float] = dict.fromkeys(get_args(Part), 0.0)
        for call, took in found.calls:
            plain_experts = call.linear.role == "experts" and call.linear.use == "none"
            part: Part = "head" if call.linear.role == "head" else "experts" if plain_experts else "matmuls"
            parts[part] += took["gemm_fp8"] + took["gemm_16bit"]
            parts["casts"] += took["cast"]
            parts["pointwise"] += took["pointwise"]
        times, scale = self.options.accumulate, self.scale
        parts = {part: ms * times for part, ms in parts.items()}
        parts["attention"], parts["optimizer"] = (found.families_ms[of] for of in ("attention", "optimizer"))
        parts["head"] += found.families_ms["loss"]
        parts["host"] = found.step_ms - found.busy_ms
        busy = (found.busy_ms - parts["optimizer"]) / times
        inside, at_end = self.exposed(busy)
        parts["communication"] = inside * times + at_end
        parts["bubble"] = (busy + inside) * (self.options.pp - 1)
        ms = found.step_ms + parts["communication"] + parts["bubble"]
        return Step(ms * scale, {part: each * scale for part, each in parts.items()}, found.in_balance)

    def exposed(self, busy_ms: float) -> tuple[float, float]:
        """Model the communication of one micro-batch and of the step's end that ``busy_ms`` does not hide."""
        share, options, gpu = self.share, self.options, self.gpu
        inside = inside_ms(share, options, gpu, busy_ms, overlaps=STACKS[self.stack].own_kernels)
        moved = of_ranks_ms(share.trained, OPTIMIZERS[options.optimizer].gradient, options, gpu)
        dense, experts = share.parameters
        if gathers_fp8(self.recipe, options):
            dense -= sum(each.parameters * each.count for each in share.layers if self.converts(each)) / 2
        weights = of_ranks_ms(Amount(dense, experts), 2.0, options, gpu)
        if options.sharding == "fsdp":
            return inside + max(0.0, 2 * weights + moved - HIDDEN * busy_ms), 0.0
        moved += weights if options.sharding == "zero1" else moved
        return inside, max(0.0, moved - HIDDEN * busy_ms)

    def peak(self) -> Peak:
        share, options, bytes_of = self.share, self.options, OPTIMIZERS[self.options.optimizer]
        weights, states, trained = share.parameters.all, share.trained.all, share.trained.all
        if options.ranks > 1 and options.sharding != "ddp":
            states = share.trained.sharded(options)
        if options.ranks > 1 and options.sharding == "fsdp":
            weights = share.parameters.sharded(options) + 2 * weights / share.blocks  # two are gathered
            trained = states
        copies = 0.0
        if self.recipe is not None and STACKS[self.stack].keeps_copies:
            copies = copies_on(self.gpu) * sum(
                one.parameters * one.count for one in share.layers if self.converts(one)
            )
            if options.checkpointing == "full" and options.accumulate == 1:
                copies /= share.blocks  # cast again with each block; several micro-batches keep them
        gradients, optimizer = bytes_of.gradient * trained / GIB, bytes_of.state * states / GIB
        return Peak(2.0 * weights / GIB, gradients, optimizer, copies / GIB, self._kept() / GIB)

    def _kept(self) -> float:
        """Add up the bytes that the forward keeps for the backward, of all micro-batches in flight.

        Sequence parallelism scatters what a layer with divided inputs adds up. Of an input that it gathered,
        Transformer Engine keeps the rank's part and gathers it again, DTensor keeps all.
        """
        share, options = self.share, self.options
        logits, layers, scattered = 0.0, [], self.stack == TRANSFORMER_ENGINE.name
        for layer in share.layers:
            linear = self.call(layer).linear
            k, n = linear.in_features, linear.out_features
            part_k, part_n = layer.sides or (k, n)
            if linear.role == "head":
                logits += 0.0 if options.fused_loss else LOGIT_BYTES["16bit"] * layer.rows * n
                continue
            sides = part_k if scattered else k, part_n if k == part_k else n
            layers.append(kept_of(linear, layer.rows * layer.count, sides=sides))
        outputs, inputs = kept_by_region(layers).get(None, (0.0, 0.0))
        kept = outputs + inputs
        hidden = 2.0 * options.tokens * share.hidden * share.blocks / options.tp
        if options.checkpointing == "full":
            kept = hidden + kept / share.blocks
        elif options.checkpointing == "selective":
            kept = hidden + outputs / 2
        return kept * min(options.pp, options.accumulate) + logits
