"""Ordinary layers: nn.Linear, Conv1D (transposed), attention projections, routers and 3-D experts."""

import re
from typing import Any

from torch import Tensor, nn

from fp8doctor.facts import Use
from fp8doctor.stacks import Layer
from fp8doctor.stacks.looking import (
    ancestor,
    children_of,
    class_name,
    is_a,
    parameters_of,
    read,
    read_class,
    tensor,
)
from fp8doctor.stacks.tensors import dtype_name, is_float8, stored, subclass

STACK = "torch"

ROUTER = re.compile(r"(router|gate)$", re.IGNORECASE)
EXPERTS = re.compile(r"expert|moe", re.IGNORECASE)
NOT_A_WEIGHT = re.compile(r"pos|embed|scale|bias", re.IGNORECASE)
"""3-D parameters of an expert module that no matmul reads."""
DOWN = re.compile(r"down|w2|wo$|output", re.IGNORECASE)
"""Expert weights that end at the hidden size; all others start from it."""


def recognise(module: nn.Module, gaps: dict[str, str]) -> tuple[Layer, ...]:
    if is_a(module, nn.Linear):
        return linear(module, gaps)
    if is_a(module, nn.MultiheadAttention):
        return attention(module)
    weight = tensor(module, "weight")
    if weight is not None and weight.ndim == 2:
        rows, columns = weight.shape
        if ancestor(type(module), "transformers.", ("Conv1D",)):
            return (layer(module, (weight,), rows, columns),)
        role = "router" if ROUTER.search(type(module).__name__) else "body"
        if role == "router" or {"lora_a", "lora_b"} <= children_of(module).keys():  # torchtune's LoRALinear
            return (layer(module, (weight,), columns, rows, role=role),)
    return experts(module)


def layer(
    module: nn.Module, weights: tuple[Tensor, ...], in_features: int, out_features: int, **more: Any
) -> Layer:
    """Describe an ordinary layer, with ``more`` fields; a plain float8 weight makes its use ``storage``."""
    data = stored(weights[0])
    use: Use = "storage" if is_float8(data) else "none"
    return Layer(
        kind=class_name(type(module)),
        stack=STACK,
        use=use,
        in_features=int(in_features),
        out_features=int(out_features),
        weights=weights,
        dtype=dtype_name(data if use == "storage" else weights[0]),
        weight_class=subclass(weights[0]),
        **{"bias": "bias" in parameters_of(module), **more},
    )


def linear(module: nn.Module, gaps: dict[str, str]) -> tuple[Layer, ...]:
    """Describe an nn.Linear or a subclass, by its own sizes or its weight's."""
    weight = tensor(module, "weight")
    if weight is None:
        gaps["network.linears"] = (
            f"{type(module).__qualname__} keeps no weight that can be looked at without running its code"
        )
        return ()
    if is_a(weight, nn.UninitializedParameter):
        gaps["network.linears"] = "a LazyLinear has no shape before its first forward"
        return ()
    role = "router" if ROUTER.search(type(module).__name__) else "body"
    of_weight = (int(weight.shape[-1]), int(weight.shape[0]))
    own = (read(module, "in_features"), read(module, "out_features"))
    in_features, out_features = (
        size if type(size) is int else known for size, known in zip(own, of_weight, strict=True)
    )
    bias = tensor(module, "bias") is not None
    features = {} if "weight" in parameters_of(module) else {"computed_weight": True}
    if read_class(type(module), "forward") is not nn.Linear.forward:
        features["own_forward"] = True
    return (layer(module, (weight,), in_features, out_features, bias=bias, role=role, features=features),)


def attention(module: nn.Module) -> tuple[Layer, ...]:
    bias = tensor(module, "in_proj_bias") is not None
    return tuple(
        layer(module, (weight,), *weight.shape[::-1], part=name, bias=bias, features={"functional": True})
        for name in ("in_proj", "q_proj", "k_proj", "v_proj")
        if (weight := tensor(module, f"{name}_weight")) is not None
    )


def experts(module: nn.Module) -> tuple[Layer, ...]:
    """Recognize 3-D weights of experts: ``[experts, out, in]`` or transposed."""
    found: list[Layer] = []
    own, own_name = parameters_of(module), bool(EXPERTS.search(type(module).__name__))
    for name, weight in own.items():
        if weight.ndim != 3 or weight.shape[0] < 2 or NOT_A_WEIGHT.search(name):
            continue
        if (own_name or EXPERTS.search(name)) and not is_a(module, nn.modules.conv._ConvNd):
            in_features, out_features, transposed = expert_shape(module, name, weight)
            more = {"part": name, "bias": f"{name}_bias" in own, "gemms": weight.shape[0], "role": "experts"}
            grouped = not transposed and multiplies_grouped(module)
            more["features"] = {"grouped_gemm": grouped}
            found.append(layer(module, (weight,), in_features, out_features, **more))
    return tuple(found)


def multiplies_grouped(module: nn.Module) -> bool:
    """Tell if a module of experts uses torch's grouped matmul, which alone torchao's wrapper takes over.

    Two implementations of transformers 5 do not. Source: ``integrations/moe.py``, 5.23.
    """
    if isinstance(read(module, "is_transposed"), bool):
        return read(read(module, "config"), "_experts_implementation") not in ("batched_mm", "eager")
    names = getattr(read(read_class(type(module), "forward"), "__code__"), "co_names", ())
    return any("grouped_mm" in each for each in names)


def expert_shape(module: nn.Module, name: str, weight: Tensor) -> tuple[int, int, bool]:
    """Return input and output features, and True for ``[experts, in, out]``."""
    last, first = int(weight.shape[2]), int(weight.shape[1])
    transposed = read(module, "is_transposed")
    if not isinstance(transposed, bool):
        sizes = (read(module, each) for each in ("hidden_size", "hidden_dim", "dim"))
        hidden = next((each for each in sizes if isinstance(each, int)), None)
        ends, starts = (first, last) if DOWN.search(name) else (last, first)
        transposed = ends != hidden and starts == hidden
    return (first, last, True) if transposed else (last, first, False)
