"""How the job is to be trained, and one GPU's share of it: layers with their local shapes, and parameters."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from fp8doctor.analysis.activations import FROM_ATTENTION, owner_of
from fp8doctor.cost.layer import Call
from fp8doctor.cost.step_cost import call_of, unmodelled, with_tokens
from fp8doctor.diagnosis.document import read_saved
from fp8doctor.errors import UserError
from fp8doctor.facts import Facts, Linear, Network, Record


class Optimizer(NamedTuple):
    """Bytes per trained parameter."""

    gradient: float
    state: float
    moved: float
    """Read and written by one step: gradient, state and weight."""


OPTIMIZERS = {
    "adamw": Optimizer(2, 4, 14),
    "adamw-fp32": Optimizer(4, 12, 30),
    "adamw-master": Optimizer(2, 12, 28),
    "adamw-8bit": Optimizer(2, 2, 10),
    "sgd": Optimizer(2, 0, 6),
}
"""Name -> bytes, of weights in 16 bits. adamw-fp32 keeps fp32 gradients, master weights and moments, as
Megatron; so does, in sum, FSDP2 with mixed precision. adamw-master keeps gradients in BF16, as DeepSpeed, and
Megatron without ``grad_reduce_in_fp32``."""

STACKS = {"torchao": "torchao", "te": "transformer_engine"}
"""Name on the command line -> name in `fp8doctor.recipes`."""

Count = Annotated[int, msgspec.Meta(ge=1)]


class Options(Record, frozen=True, kw_only=True):
    """One training job, as asked for. Batch and rows are those of one data-parallel rank."""

    batch: Count = 1
    seq: Count = 4096
    dp: Count = 1
    tp: Count = 1
    cp: Count = 1
    pp: Count = 1
    ep: Count = 1
    """Ranks that divide the experts; they are among those of dp and cp."""
    accumulate: Count = 1
    """Micro-batches per step."""
    sharding: Literal["fsdp", "zero1", "ddp"] = "fsdp"
    """What the data-parallel ranks share: weights, gradients and optimizer; only the optimizer; nothing."""
    checkpointing: Literal["none", "selective", "full"] = "none"
    """``selective`` repeats every second matmul and what lies between, as torchtitan's per-op policy."""
    fused_loss: bool = False
    """The loss takes the logits in chunks and keeps none of them, as Liger Kernel's."""
    lora: Count | None = None
    """Rank of the adapters."""
    lora_modules: tuple[str, ...] = ()
    """Last parts of the names of the layers that get them; empty for all in the blocks."""
    optimizer: Literal["adamw", "adamw-fp32", "adamw-master", "adamw-8bit", "sgd"] = "adamw"
    stack: Literal["torchao", "te"] | None = None
    """None for both."""
    recipe: str = "all"
    step_ms: Annotated[float, msgspec.Meta(gt=0)] | None = None
    """A measured BF16 step on the first GPU, which all times are scaled to."""

    @property
    def gpus(self) -> int:
        return self.dp * self.tp * self.cp * self.pp

    @property
    def ranks(self) -> int:
        """Count the GPUs with other data, or another part of a sequence."""
        return self.dp * self.cp

    @property
    def tokens(self) -> int:
        """Count the rows of one micro-batch on one GPU."""
        return self.batch * self.seq // self.cp


def options_for(facts: Facts, given: Mapping[str, Any]) -> Options:
    """Complete the options that were given by the batch of the facts."""
    workload = {
        "batch": facts.get("workload.batch_size"),
        "seq": facts.get("workload.sequence_length"),
        "accumulate": facts.get("workload.accumulate"),
    }
    found = {name: value for name, value in workload.items() if value}
    if any(each.get("checkpointed") is not None for each in facts.network.linears):
        found["checkpointing"] = "full"
    if "seq" not in found and (tokens := facts.get("workload.tokens")):
        found["seq"] = tokens // found.get("batch", 1)
    found |= {name: value for name, value in given.items() if value is not None}
    try:
        return msgspec.convert(found, Options)
    except msgspec.ValidationError as error:
        raise UserError(f"these options cannot be planned: {error}") from None


def saved_facts(path: Path) -> Facts | None:
    """Read the facts of a saved report; None for another file. Raises `UserError` for a broken report."""
    if path.suffix not in (".json", ".gz") or not path.is_file():
        return None
    with contextlib.suppress(OSError):
        content = path.read_bytes()
        if path.suffix == ".gz" or (b'"facts"' in content and b'"schema_version"' in content):
            return read_saved(path)[0]
    return None


KEYS = ("k_proj", "v_proj", "key", "value", "wk", "wv", "to_k", "to_v", "k", "v")
"""Last parts of the names of layers that make keys and values, of which there are fewer heads."""

ALIKE = ("in_features", "out_features", "gemms", "role", "adapter", "requires_grad", "bias", "use")
"""Facts that layers of one shape and kind share."""

REPLICATED = ("q_a_proj", "kv_a_proj_with_mqa", "kv_a_proj")
"""Layers of multi-head latent attention that every rank of tensor parallelism computes whole. Source:
torchtitan's plan for DeepSeek-V3, in which they have no ColwiseParallel."""


class Layer(Call, frozen=True):
    """The calls of all layers of one shape and kind, as the first of them with its sides on one GPU."""

    parameters: float = 0.0
    """Of each on one GPU, unless they are sharded."""


class Amount(NamedTuple):
    """Parameters on one GPU if nothing is sharded over the data-parallel ranks."""

    dense: float
    experts: float

    @property
    def all(self) -> float:
        return self.dense + self.experts

    def sharded(self, options: Options) -> float:
        """Divide them over the ranks, those of experts over the ranks with the same experts."""
        return (self.dense + self.experts * options.ep) / options.ranks


class Share(Struct, frozen=True):
    """The part of a job that one GPU computes, at the pipeline stage with most layers."""

    layers: tuple[Layer, ...]
    parameters: Amount
    trained: Amount
    blocks: int
    """Repeated blocks of one stage."""
    facts: Facts
    """The job with the rows of one GPU, for the parts that are no Linears."""

    @property
    def hidden(self) -> int:
        return self.facts.network.get("hidden_size") or 0


def share_of(facts: Facts, options: Options) -> Share:
    """Divide a job over its GPUs. Raises `UserError` if it cannot be divided."""
    facts = with_adapters(facts, options) if options.lora else facts
    network = facts.network
    blocks = max((each.count for each in network.get("blocks", ())), default=0)
    if reason := next(_not_divided(network, options, blocks), ""):
        raise UserError(reason)
    blocks = max(1, blocks)
    stage = -(-blocks // options.pp)
    batch = {"batch_size": options.batch, "sequence_length": options.seq, "accumulate": options.accumulate}
    facts = with_tokens(facts, options.tokens)
    facts = replace(facts, workload=replace(facts.workload, tokens=options.tokens, **batch))
    found: dict[tuple[object, ...], Layer] = {}
    for linear in network.linears:
        layer = layer_of(linear, facts, options)
        owner, last = owner_of(linear)
        key = (layer.rows, *(layer.linear.get(each) for each in ALIKE), owner.rpartition(".")[2], last)
        seen = found.get(key)
        found[key] = layer if seen is None else replace(seen, count=seen.count + layer.count)
    for key, each in found.items():
        if each.linear.role != "head":
            found[key] = replace(each, count=max(1, round(each.count * stage / blocks)))
    layers = tuple(found.values())
    parameters = _amount(layers, network.parameters, network.linears, options)
    train = [each for each in layers if each.linear.requires_grad]
    linears = [each for each in network.linears if each.requires_grad]
    trained = _amount(train, network.get("trainable_parameters", 0), linears, options)
    return Share(layers, parameters, trained, stage, facts)


def _amount(layers: Sequence[Layer], whole: int, linears: Sequence[Linear], options: Options) -> Amount:
    """Add up parameters of the layers and of what is none: embeddings, norms."""
    of = {True: 0.0, False: 0.0}
    for each in layers:
        of[each.linear.role == "experts"] += each.parameters * each.count
    rest = max(0, whole - sum(each.parameters for each in linears))
    return Amount(of[False] + rest / options.tp, of[True])


def _not_divided(network: Network, options: Options, blocks: int) -> Iterator[str]:
    """Say why a job cannot be divided, or not be known. Tensor parallelism divides the heads of attention."""
    if reason := unmodelled(network):
        yield f"{reason}, so it cannot estimate the step"
    of_keys, tp = network.get("key_value_heads"), options.tp
    for name, by, count, what in (
        ("cp", options.cp, options.seq, "tokens of a sequence"),
        ("ep", options.ep, options.ranks, "ranks of --dp and --cp"),
        ("tp", tp, network.get("heads") or 0, "heads of attention"),
    ):
        if count % by:
            yield f"--{name} {by} does not divide the {count:,} {what}"
    if of_keys and of_keys % tp and tp % of_keys:
        yield f"--tp {tp} does not divide the {of_keys} heads of keys and values"
    if options.pp > max(1, blocks):
        yield f"--pp {options.pp} has more stages than the model has blocks ({max(1, blocks)})"


def layer_of(linear: Linear, facts: Facts, options: Options) -> Layer:
    network, experts = facts.network, linear.role == "experts"
    hidden = network.get("hidden_size")
    last = owner_of(linear)[1]
    local_k, local_n = k, n = linear.in_features, linear.out_features
    if options.tp > 1 and linear.role != "router" and last not in REPLICATED:
        if (n == hidden and k != hidden) or (k == n and last in FROM_ATTENTION):
            local_k = _cut(k, options.tp, linear.name)
        else:
            copies = min(options.tp, network.get("key_value_heads") or options.tp)
            local_n = _cut(n, copies if last in KEYS else options.tp, linear.name)
    call, gemms = call_of(linear, facts), linear.get("gemms", 1)
    local = max(1, gemms // options.ep) if experts else gemms
    return Layer(
        replace(linear, in_features=local_k, out_features=local_n, gemms=local),
        max(1, call.rows or options.tokens),
        call.count,
        sides=(k / options.tp, n / options.tp),
        parameters=linear.parameters * (local_k * local_n * local) / (k * n * gemms),
    )


def _cut(side: int, ranks: int, name: str) -> int:
    if side % ranks:
        raise UserError(f"--tp {ranks} does not divide the {side:,} features of {name}")
    return side // ranks


def with_adapters(facts: Facts, options: Options) -> Facts:
    """Freeze the model and put LoRA next to the layers of its blocks, in 16 bits."""
    wanted = options.lora_modules
    linears = [each for linear in facts.network.linears for each in _adapted(linear, options)]
    added = sum(each.parameters for each in linears if each.adapter == "adapter")
    if not added:
        named = sorted({each.name.rpartition(".")[2] for each in facts.network.linears})
        raise UserError(f"no layer is named {' or '.join(wanted)}; the model has {', '.join(named)}")
    counts = {"parameters": facts.network.parameters + added, "trainable_parameters": added}
    return replace(facts, network=replace(facts.network, linears=tuple(linears), **counts))


def _adapted(linear: Linear, options: Options) -> Iterator[Linear]:
    """Freeze a layer, whose FLOPs then lack the weight gradient, and add its adapters."""
    flops, rank = linear.get("flops_per_token"), options.lora or 0
    if flops and linear.requires_grad is not False:
        linear = replace(linear, flops_per_token=flops * 2 / 3)
    last = linear.name.rpartition(".")[2]
    if linear.role != "body" or (options.lora_modules and last not in options.lora_modules):
        yield replace(linear, requires_grad=False)
        return
    yield replace(linear, requires_grad=False, adapter="base", name=f"{linear.name}.base_layer")
    matrix = replace(linear, requires_grad=True, adapter="adapter", bias=False)
    for part, k, n in (("lora_A", linear.in_features, rank), ("lora_B", rank, linear.out_features)):
        name = f"{linear.name}.{part}"
        yield replace(matrix, name=name, in_features=k, out_features=n, parameters=k * n)
