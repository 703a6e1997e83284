"""Describe linear layers as facts: role, adapter, cover, parameters, FLOPs."""

from collections.abc import Sequence
from itertools import islice
from typing import Any, Literal

from msgspec.structs import replace
from torch import nn

from fp8doctor.examine.distributed import gathered_as, tensor_parallel
from fp8doctor.examine.walk import Place, Tree
from fp8doctor.facts import NOT_RECORDED, Blocks, Linear, Scaling, recorded
from fp8doctor.facts.network import GATHERED_AS
from fp8doctor.stacks import Layer, plain, recognise, scaling
from fp8doctor.stacks.looking import is_a, is_torchscript, read, state_of

VISITED = tuple(
    """
    num_experts_per_tok num_experts_per_token experts_per_token n_expert_per_token moe_top_k moe_topk
    moe_k
    """.split()
)
"""Settings with the number of experts per token; ``top_k`` is for generation."""

PRETRAINED = ("transformers.modeling_utils", "PreTrainedModel")

Found = tuple[Place, Layer]


def find_layers(tree: Tree, gaps: dict[str, str]) -> list[Found]:
    scripted = [place.name for place in tree.places if is_torchscript(type(place.module))]
    if scripted:
        gaps["network.linears"] = (
            f"layers inside TorchScript are not read ({len(scripted)} modules, "
            f"first {scripted[0] or 'the model itself'})"
        )
    return [
        (place, layer) for place in tree.places if not place.idle for layer in recognise(place.module, gaps)
    ]


def describe(
    found: Sequence[Found],
    tree: Tree,
    config: Any,
    vocabulary: int | None,
    blocks: Sequence[Blocks],
    gaps: dict[str, str],
) -> tuple[Linear, ...]:
    """Describe all layers; without FLOPs shares if one layer's FLOPs are unknown."""
    heads = find_heads(found, vocabulary, blocks)
    in_training = bool(read(tree.root.module, "training"))
    return with_shares(
        [
            _linear(place, layer, number in heads, config, gaps, in_training=in_training)
            for number, (place, layer) in enumerate(found)
        ]
    )


def with_shares(linears: Sequence[Linear]) -> tuple[Linear, ...]:
    """Add each layer's share of the FLOPs; none if one layer's are unknown."""
    if not all(recorded(each, "flops_per_token") for each in linears):
        return tuple(linears)
    total = sum(each.flops_per_token or 0.0 for each in linears) or 1.0
    shares = (100.0 * (each.flops_per_token or 0.0) / total for each in linears)
    return tuple(replace(each, flops_share_pct=share) for each, share in zip(linears, shares, strict=True))


def _linear(
    place: Place, layer: Layer, is_head: bool, config: Any, gaps: dict[str, str], *, in_training: bool
) -> Linear:
    name = ".".join(each for each in (place.name, layer.part) if each)
    trained = any(each.requires_grad for each in layer.weights)
    flops = flops_per_token(place, layer, trained, config)
    if flops is NOT_RECORDED:
        why = f"{name} does not say how many of its experts a token visits"
        gaps["network.linears.flops_per_token"] = gaps["network.linears.flops_share_pct"] = why
    features, use = dict(layer.features), layer.use
    own = features.get("own_forward") or "forward" in state_of(place.module)
    if use == "storage" and layer.stack == plain.STACK and own:
        use = "unknown"  # until that forward is seen
    if place.parent and is_a(place.parent.module, nn.MultiheadAttention):
        features["functional"] = True
        if use == "training" and layer.weight_class is None:  # its weight is read, and it is never called
            use = "none"
    if (gathered := gathered_as(place)) is not None:
        features[GATHERED_AS] = gathered
    if layer.use == "training" and in_training and not read(place.module, "training"):
        features["in_eval"] = True
    rows, columns = tensor_parallel(place, layer.weights[0])
    if rows * columns > 1:
        features["tensor_parallel"] = rows * columns
    return Linear(
        name=name,
        kind=layer.kind,
        stack=layer.stack,
        use=use,
        recipe=layer.recipe,
        features=features,
        engaged=layer.engaged,
        in_features=layer.in_features // columns,
        out_features=layer.out_features // rows,
        gemms=layer.gemms,
        bias=layer.bias,
        dtype=layer.dtype,
        weight_class=layer.weight_class,
        requires_grad=trained,
        role=role(place, layer, is_head),
        adapter=place.adapts.get("", place.adapter),
        adapts=place.name if "" in place.adapts else place.adapted,
        compiled=place.compiled,
        checkpointed=place.checkpointed,
        parameters=elements(layer) + layer.out_features * layer.gemms * layer.bias,
        flops_per_token=flops,
    )


def elements(layer: Layer) -> int:
    return layer.in_features * layer.out_features * layer.gemms


def role(place: Place, layer: Layer, is_head: bool) -> Literal["body", "head", "router", "experts"]:
    """Return the layer's work; a router has an output for each expert next to it or its holder."""
    if layer.role != "body":
        return layer.role
    if place.experts or is_head:
        return "experts" if place.experts else "head"
    while place.parent is not None and read(place.parent.module, "base_layer") is not None:
        place = place.parent
    for level, holder in enumerate(islice(place.upwards(), 1, 3)):
        if level and place.parent and not place.parent.outputs <= {layer.out_features}:
            break
        if layer.out_features in holder.experts_below:
            return "router"
    return "body"


def flops_per_token(place: Place, layer: Layer, trained: bool, config: Any) -> Any:
    """Count matmul FLOPs per token: 2*K*N each for output, input and weight gradient.

    The input gradient counts if this or an earlier module has a trainable parameter. The weight gradient
    counts if the weight trains. ``NOT_RECORDED`` if the experts per token are unknown.
    """
    matmuls = 1 + place.trainable_so_far + (trained and layer.use != "storage")
    one = 2.0 * layer.in_features * layer.out_features * matmuls
    if not place.experts and layer.role != "experts":
        return one * layer.gemms
    visited = visited_experts(place, config)
    return NOT_RECORDED if visited is None else one * visited / (place.experts or 1)


def visited_experts(place: Place, config: Any) -> int | None:
    """Return the number of experts per token, by a router, its holder or the configuration.

    A layer is at most six levels below: adapters, part, expert, list, module. Source of ``top_k`` and ``k``:
    transformers 5, DeepSpeed's ``TopKGate``.
    """
    for at in islice(place.upwards(), 6):
        for each in (at, *at.routers):
            for name in ("top_k", "k", *VISITED):
                if type(value := state_of(each.module).get(name)) is int:
                    return value
    return next((value for name in VISITED if type(value := read(config, name)) is int), None)


def find_heads(found: Sequence[Found], vocabulary: int | None, blocks: Sequence[Blocks]) -> set[int]:
    """Return the indices of layers that make logits: the last as wide as the vocabulary, or by name.

    In a block that is the model's last alone. And those of its name in other models of the job, such as a
    teacher or a reference.
    """
    inside = tuple(f"{each.name}." for each in blocks)
    candidates = [
        i
        for i, (place, layer) in enumerate(found)
        if layer.role == "body" and place.adapter != "adapter" and not place.experts
    ]
    outside = {i for i in candidates if not found[i][0].name.startswith(inside)}
    ends = outside | {*candidates[-1:]}
    wide = [i for i in sorted(ends) if vocabulary and found[i][1].out_features == vocabulary]
    names = ("head", "score", "classifier")
    by_name = [i for i in sorted(outside) if any(e.endswith(names) for e in found[i][0].name.split("."))]
    heads = wide or by_name

    def called(i: int) -> tuple[object, ...]:
        """Return the last part of a name; for one of several in a list, the list and their sides."""
        layer, (holder, _, last) = found[i][1], found[i][0].name.rpartition(".")
        return (holder, layer.in_features, layer.out_features) if last.isdigit() else (last,)

    return {i for i in heads if i == heads[-1] or (i in outside and called(i) == called(heads[-1]))}


def examine_scaling(tree: Tree) -> tuple[Scaling, ...]:
    """List the model's ways of scaling, with the count and first of their layers."""
    found: dict[Scaling, list[str]] = {}
    for place in tree.places:
        if (each := scaling(place.module)) is not None:
            found.setdefault(each, []).append(place.name)
    return tuple(replace(each, layers=len(names), first=names[0]) for each, names in found.items())
