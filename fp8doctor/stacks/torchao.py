"""Recognize torchao's layers and weights (0.10 to 0.18).

A Float8Linear's weight stays an ordinary parameter, so its class and configuration count; torchtitan's
subclasses are found by their ancestors. Since 0.17 MX wraps the weight of an nn.Linear.
"""

from dataclasses import replace
from enum import Enum
from typing import Any

from torch import Tensor, nn

from fp8doctor.facts import Scaling, Use
from fp8doctor.recipes import RECIPES, TORCHAO, by_class
from fp8doctor.stacks import Cast, Layer, NoCounterpart, plain
from fp8doctor.stacks.looking import (
    ancestor,
    is_a,
    lineage,
    parameters_of,
    read,
    read_class,
    state_of,
    tensor,
)
from fp8doctor.stacks.tensors import dtype_name, local, stored

STACK = TORCHAO.name

Features = dict[str, bool | int | str | None]

FLOAT8 = ("Float8Linear", "Float8LinearNoCompile")
OTHERS = ("MXLinear", "MXFP8Linear", "NVFP4Linear", "Float8BlockwiseLinear")
TRAINING_WEIGHTS = (
    "MXFP8TrainingWeightWrapperTensor",
    "Float8TrainingWeightWrapperTensor",
    "ScaledGroupedMMTensor",
)
ALL_GATHER_WEIGHT = "WeightWithDynamicFloat8CastTensor"
NOT_FP8 = ("Int8MixedPrecisionTrainingLinearWeight", "BitNetTrainingLinearWeight")
"""16- or 32-bit weights for INT8 or ternary matmuls."""

OP_CONFIGS = ("_float8_op_config", "_mxfp8_op_config")
"""Attributes of torchtitan's expert modules with their FP8 configuration."""

CONVERTER_HOME = "torchao.float8.float8_linear_utils"
"""Module of ``convert_to_float8_training`` (0.10 to 0.18)."""

CONVERTER_TRACE = "torchao.float8._inductor_patch"
"""Module that only the converter imports, when called (0.18)."""

CASTS = tuple(
    f"cast_config_{operand}"
    for operand in """
    input input_for_grad_weight weight weight_for_grad_input grad_output grad_output_for_grad_weight
    """.split()
)

RECIPE_OF = {each.operands: each.name for each in RECIPES.values() if each.operands}
"""How the operands are scaled, in the order of `CASTS` -> torchao's recipe (0.10 to 0.18)."""


def recognise(module: nn.Module, gaps: dict[str, str]) -> tuple[Layer, ...]:
    kind = ancestor(type(module), "torchao.", FLOAT8 + OTHERS)
    if kind and is_a(module, nn.Linear):
        described = plain.linear(module, gaps)
        name = kind.rpartition(".")[2]
        if name in FLOAT8:
            recipe, features = float8(module, gaps)
        else:  # a prototype's settings (0.10 to 0.16); an MXLinear may be FP8 or FP4
            config = state_of(module).get("config")
            is_fp4 = name == "MXLinear" and "float8" not in str(read(config, "elem_dtype", "float8"))
            recipe = "mxfp4" if is_fp4 else by_class(STACK).get(name, "mxfp8")
            features = config_features(config) | config_features(module)
        features |= all_gather(tensor(module, "weight"))
        return tuple(
            replace(each, kind=kind, stack=STACK, use="training", recipe=recipe, features=features)
            for each in described
        )
    if not configured(module) and not any(map(tensor_class, parameters_of(module).values())):
        return ()
    return tuple(by_weight(each, module) for each in plain.recognise(module, gaps))


def configured(module: nn.Module) -> bool:
    state, kind = state_of(module), type(module)
    return any(name in state or read_class(kind, name) is not None for name in OP_CONFIGS)


def casts(module: nn.Module) -> dict[str, Cast]:
    """Return a Float8Linear's casts for its output and its input's gradient (0.10 to 0.18)."""
    config: Any = state_of(module).get("config")
    if config is None or ancestor(type(module), "torchao.", FLOAT8) is None:
        return {}
    found = {}
    for operand, name in (("input", "input"), ("weight", "weight"), ("gradient", "grad_output")):
        cast = read(config, f"cast_config_{name}")
        kind, scales = str(read(cast, "target_dtype")), _word(read(cast, "scaling_granularity"))
        if _word(read(cast, "scaling_type")) != "disabled" and kind.startswith("torch.float8"):
            found[operand] = Cast(
                dtype=kind.removeprefix("torch."),
                rows="row" if scales == "axiswise" else "tensor",
                power_of_2=read(config, "round_scales_to_power_of_2") is True,
            )
    return found


def scaling(module: nn.Module) -> Scaling | None:
    if not (found := casts(module)):
        return None
    forward = dict.fromkeys(found[each].dtype for each in ("input", "weight") if each in found)
    return Scaling(stack=STACK, forward_dtypes=tuple(forward), amax_history_len=None, amax_compute_algo=None)


def tensor_class(weight: Tensor) -> str | None:
    """Return the torchao class of a weight, also inside a DTensor, or None."""
    kinds = lineage(type(local(weight)))
    return next((name for module, name in kinds if module.startswith("torchao.")), None)


def by_weight(layer: Layer, module: nn.Module) -> Layer:
    """Describe a layer by its torchao weight or its module's configuration."""
    weight = local(layer.weights[0])
    name = tensor_class(weight)
    if name in TRAINING_WEIGHTS:
        config = read(weight, "config") or weight
        own = {} if layer.role == "experts" else own_forward(type(module), "torch.nn.")
        reached = layer.role != "experts" or plain.multiplies_grouped(module)
        return replace(
            layer,
            stack=STACK,
            use="training" if reached else "none",
            recipe=weight_recipe(config),
            features=layer.features | config_features(config) | own,
        )
    if name is None:
        config = next((found for name in OP_CONFIGS if (found := read(module, name)) is not None), None)
        if config is None:
            return layer
        recipe, features = weight_recipe(config), config_features(config)
        return replace(layer, stack=STACK, use="training", recipe=recipe, features=features)
    if name == ALL_GATHER_WEIGHT:
        return layer
    use: Use = "none" if name in NOT_FP8 else "storage"
    missing = object()
    if (settings := read(weight, "act_quant_kwargs", missing)) is not missing:
        layer = replace(layer, features=layer.features | {"activations_quantized": settings is not None})
    return replace(layer, stack=STACK, use=use, dtype=dtype_name(stored(weight)))


def float8(module: nn.Module, gaps: dict[str, str]) -> tuple[str | None, Features]:
    config: Any = state_of(module).get("config")
    casts = [read(config, cast) for cast in CASTS]
    if None in casts:
        gaps["network.linears.recipe"] = (
            "this Float8Linear carries no Float8LinearConfig (known from torchao 0.10 to 0.18)"
        )
        return None, {}
    signature = tuple(map(cast_in_words, casts))
    names = ("emulate", "pad_inner_dim", "enable_fsdp_float8_all_gather")
    features: Features = {name: bool(read(config, name)) for name in names}
    features["use_fast_accum"] = bool(config.gemm_config_output.use_fast_accum)
    return RECIPE_OF.get(signature, "custom"), features | own_forward(type(module))


def cast_in_words(cast: Any) -> str:
    """Return ``tensorwise e4m3``, ``axiswise e5m2``, ..., or ``disabled``."""
    if _word(cast.scaling_type) == "disabled":
        return "disabled"
    target = str(cast.target_dtype).removeprefix("torch.float8_")[:4]
    return f"{_word(cast.scaling_granularity)} {target}"


def all_gather(weight: Tensor | None) -> Features:
    """Return the settings of FSDP's float8 all-gather, if it wraps the weight."""
    if weight is None or tensor_class(weight) != ALL_GATHER_WEIGHT:
        return {}
    return {
        "float8_all_gather_weight": True,
        "precomputed_scale": read(local(weight), "_precomputed_scale") is not None,
    }


def own_forward(kind: type, library: str = "torchao.") -> Features:
    home = str(read(read_class(kind, "forward"), "__module__", library))
    return {} if home.startswith(library) else {"own_forward": True}


def config_features(config: Any) -> Features:
    """Read a prototype's settings (0.10 to 0.18); ``emulate`` uses no FP8 kernel."""
    features: Features = {}
    for name in ("kernel_preference", "gemm_kernel_choice"):
        if isinstance(value := read(config, name), Enum):
            features["emulate"] = _word(value) == "emulated"
    for name in ("wgrad_with_hp", "pad_token_groups_for_grouped_mm"):
        if isinstance(value := read(config, name), bool):
            features[name] = value
    return features


def weight_recipe(config: Any) -> str:
    """Return the recipe that a training weight's configuration names, or its class's."""
    named = read(config, "float8_linear_recipe") or read(config, "scaling_type")
    if named is not None:
        return (named if isinstance(named, str) else _word(named)).removeprefix("fp8_")
    return "mxfp8" if "MXFP8" in type(config).__name__ else "rowwise"


def _word(member: Any) -> str:
    """Return an enum member's text value, else its name."""
    value = read(member, "value", member)
    return (value if isinstance(value, str) else str(read(member, "name", member))).lower()


def bf16_counterpart(module: nn.Module) -> nn.Module:
    if ancestor(type(module), "torchao.", FLOAT8 + OTHERS) and isinstance(module, nn.Linear):
        linear = nn.Linear(module.in_features, module.out_features, bias=False, device="meta")
        linear.weight, linear.bias = unwrapped(module.weight), module.bias
        return linear.train(module.training)
    if configured(module):
        raise NoCounterpart(f"{type(module).__name__} decides by its own configuration what runs in FP8")
    for name, weight in parameters_of(module).items():
        if tensor_class(weight) in TRAINING_WEIGHTS:
            module._parameters[name] = unwrapped(weight)
    return module


def unwrapped(weight: Tensor) -> nn.Parameter:
    if tensor_class(weight) is None and isinstance(weight, nn.Parameter):
        return weight
    inner = getattr(weight, "_tensor", None)
    inner = getattr(weight, "_data", None) if inner is None else inner
    if not isinstance(inner, Tensor):
        raise NoCounterpart(
            f"its weights are {type(weight).__name__}, whose data are not where torchao 0.10 to 0.18 keep "
            "them"
        )
    return nn.Parameter(inner.detach(), requires_grad=weight.requires_grad)
