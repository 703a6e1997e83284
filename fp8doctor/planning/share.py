"""One GPU's share of a job: its layers with their local shapes, and its parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from msgspec import Struct
from msgspec.structs import replace

from fp8doctor.cost import calls_of, gemms, routed_rows, rows_seen, step_tokens
from fp8doctor.cost.step_cost import FUSED_QUERIES, QUERIES
from fp8doctor.errors import UserError
from fp8doctor.facts import Facts, Linear
from fp8doctor.planning.options import Options

ROW_WISE = ("o_proj", "out_proj", "wo", "dense", "c_proj", "proj", "to_out", "linear_proj", "out", "o")
"""Last part of the name of a layer from attention back to the model's width, in which tensor parallelism cuts
the inputs. It cuts those of every other layer that ends at that width too."""

REPLICATED = ("q_a_proj", "kv_a_proj_with_mqa", "kv_a_proj")
"""Layers of multi-head latent attention that every rank of tensor parallelism computes whole. Source:
torchtitan's plan for DeepSeek-V3, in which they have no ColwiseParallel."""


class Layer(Struct, frozen=True):
    """Layers of one shape and kind."""

    linear: Linear
    """The first of them, with the sides that it has on one GPU."""
    count: int
    """Calls of such layers in one forward."""
    rows: int
    """Of one call; of experts, over all of them."""
    around: int
    """Features of its input and output on one GPU, with sequence parallelism."""
    parameters: int
    """On one GPU, unless they are sharded."""
    owner: str
    """The module that its input belongs to: layers of one owner and width share it."""
    last: str
    """Last part of its name."""
    sliced: bool
    """Whether tensor parallelism cuts it."""


class Share(Struct, frozen=True):
    """The part of a job that one GPU computes, at the pipeline stage with most layers."""

    layers: tuple[Layer, ...]
    parameters: float
    """Of all weights that the GPU holds if nothing is sharded."""
    trained: float
    blocks: int
    """Repeated blocks of one stage."""
    facts: Facts
    """The job with the rows of one GPU, for the parts that are no Linears."""


def share_of(facts: Facts, options: Options) -> Share:
    """Divide a job over its GPUs. Raises `UserError` if it cannot be divided."""
    facts = with_adapters(facts, options) if options.lora else facts
    network = facts.network
    blocks = max((each.count for each in network.get("blocks", ())), default=1)
    if options.pp > blocks:
        raise UserError(f"--pp {options.pp} has more stages than the model has blocks ({blocks})")
    stage = -(-blocks // options.pp)
    before, tokens = step_tokens(facts) or options.tokens, options.tokens
    found: dict[tuple[object, ...], Layer] = {}
    for linear in network.linears:
        layer = _layer(linear, facts, options, tokens / before)
        key = (*_shape(layer), layer.owner.rpartition(".")[2], layer.last)
        seen = found.get(key)
        found[key] = layer if seen is None else replace(seen, count=seen.count + layer.count)
    layers = [
        replace(each, count=max(1, round(each.count * stage / blocks)))
        if each.linear.role != "head"
        else each
        for each in found.values()
    ]
    by_linears = sum(each.parameters for each in network.linears)
    local = sum(each.parameters * each.count for each in layers)
    others = max(0, network.parameters - by_linears) / options.tp
    trained = sum(each.parameters * each.count for each in layers if each.linear.requires_grad)
    workload = replace(
        facts.workload,
        tokens=tokens,
        batch_size=options.batch,
        sequence_length=options.seq,
        accumulate=options.accumulate,
        rows={name: tuple(round(each * tokens / before) for each in rows) for name, rows in _rows(facts)},
    )
    return Share(
        tuple(layers),
        local + others,
        trained if options.lora else trained + others,
        stage,
        replace(facts, workload=workload),
    )


def _rows(facts: Facts) -> Iterator[tuple[str, tuple[int, ...]]]:
    return ((each.name, rows) for each in facts.network.linears if (rows := rows_seen(each, facts)))


def _shape(layer: Layer) -> tuple[object, ...]:
    linear = layer.linear
    kept = ("in_features", "out_features", "gemms", "role", "adapter", "requires_grad", "bias", "dtype")
    return (layer.rows, *(linear.get(each) for each in kept))


def _layer(linear: Linear, facts: Facts, options: Options, scale: float) -> Layer:
    """Describe one layer as one GPU has it."""
    hidden = facts.network.get("hidden_size")
    owner, _, last = linear.name.removesuffix(".base_layer").rpartition(".")
    if linear.adapter == "adapter":
        owner = owner.rpartition(".")[0]
    k, n = linear.in_features, linear.out_features
    sliced = options.tp > 1 and linear.role != "router" and last not in REPLICATED
    inward = (n == hidden and k != hidden) or (k == n and last in ROW_WISE)
    local_k, local_n = k, n
    if sliced and inward:
        local_k = _cut(k, linear.name, options)
    elif sliced:
        local_n = _cut(n, linear.name, options)
    if linear.role == "experts":
        rows = round((routed_rows(linear, facts) or options.tokens) * scale)
        calls = 1
    else:
        seen = max(rows_seen(linear, facts), default=0) or step_tokens(facts) or options.tokens
        rows, calls = max(1, round(seen * scale)), calls_of(linear, facts)
    return Layer(
        replace(linear, in_features=local_k, out_features=local_n),
        calls,
        rows,
        -(-(k + n) // options.tp),
        round(linear.parameters * (local_k * local_n) / (k * n)),
        owner,
        last,
        sliced,
    )


def _cut(side: int, name: str, options: Options) -> int:
    if side % options.tp:
        raise UserError(f"--tp {options.tp} does not divide the {side:,} features of {name}")
    return side // options.tp


def with_adapters(facts: Facts, options: Options) -> Facts:
    """Freeze the model and put LoRA next to the layers of its blocks, in 16 bits."""
    rank, wanted = options.lora or 0, options.lora_modules
    linears: list[Linear] = []
    added = 0
    for linear in facts.network.linears:
        last = linear.name.rpartition(".")[2]
        flops = linear.get("flops_per_token")
        frozen = {} if flops is None or linear.requires_grad is False else {"flops_per_token": flops * 2 / 3}
        linears.append(replace(linear, requires_grad=False, **frozen))
        if linear.role != "body" or (wanted and last not in wanted):
            continue
        linears[-1] = replace(linears[-1], adapter="base", name=f"{linear.name}.base_layer")
        for part, k, n in (("lora_A", linear.in_features, rank), ("lora_B", rank, linear.out_features)):
            adapter = replace(
                linear,
                name=f"{linear.name}.{part}",
                in_features=k,
                out_features=n,
                adapter="adapter",
                parameters=k * n,
                bias=False,
            )
            linears.append(adapter)
            added += k * n
    if not added:
        named = Counter(each.name.rpartition(".")[2] for each in facts.network.linears)
        raise UserError(f"no layer is named {' or '.join(wanted)}; the model has {', '.join(sorted(named))}")
    network = replace(
        facts.network,
        linears=tuple(linears),
        parameters=facts.network.parameters + added,
        trainable_parameters=added,
    )
    return replace(facts, network=network)


def is_query(layer: Layer) -> bool:
    """Return whether attention has one such layer."""
    return layer.linear.adapter != "adapter" and layer.last in QUERIES + FUSED_QUERIES


def products(layer: Layer) -> int:
    """Count its matmuls in one forward."""
    return layer.count * (1 if layer.linear.role == "experts" else gemms(layer.linear))
