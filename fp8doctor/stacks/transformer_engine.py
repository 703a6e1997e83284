"""Recognize Transformer Engine's layers by their base class (1.0 to 2.20), and its private names below them.

te.Linear is no nn.Linear. The autocast around a forward decides if it runs in FP8, so only a module that has
run can tell. Private names have one small function each, verified in the sources of 1.0 to 2.20, and on a GPU
with 2.20.2; without the library or the name, the answer is None.
"""

import inspect
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fp8doctor.facts import NOT_RECORDED, Scaling
from fp8doctor.recipes import TRANSFORMER_ENGINE, by_class
from fp8doctor.stacks import Cast, Layer, NoCounterpart
from fp8doctor.stacks.looking import ancestor, parameters_of, read, state_of
from fp8doctor.stacks.tensors import dtype_name, subclass

STACK = TRANSFORMER_ENGINE.name
PREFIX = "transformer_engine.pytorch."

GEMM_MODULES = ("Linear", "LayerNormLinear", "LayerNormMLP", "GroupedLinear", "BasicLinear")
FORMATS = {
    "E4M3": ("float8_e4m3fn", "float8_e4m3fn"),
    "HYBRID": ("float8_e4m3fn", "float8_e5m2"),
    "E5M2": ("float8_e5m2", "float8_e5m2"),
}
"""``Format`` -> dtypes of the forward and of the backward (``common/recipe``, 2.20)."""


def recognise(module: nn.Module, gaps: dict[str, str]) -> tuple[Layer, ...]:
    """Describe a module's matmuls; a fused MLP has two.

    FSDP1 leaves a flat part of each weight, maybe an empty one, so its sides are those that the module keeps.
    """
    kind = ancestor(type(module), PREFIX, GEMM_MODULES)
    if kind is None or not (
        ancestor(type(module), PREFIX + "module.base", ("TransformerEngineBaseModule",))
        or kind.endswith((".ops.basic.basic_linear.BasicLinear", ".ops.basic.grouped_linear.GroupedLinear"))
    ):
        return ()
    record, grouped = record_of(module, gaps), kind.endswith(".GroupedLinear")
    parameters = {name: each for name, each in parameters_of(module).items() if "layer_norm" not in name}
    sides: Any = tuple(state_of(module).get(name) for name in ("out_features", "in_features"))
    found = []
    for part in ("fc1", "fc2") if kind.endswith(".LayerNormMLP") else ("",):
        own = {name: each for name, each in parameters.items() if name.startswith(part)}
        weights = tuple(each for name, each in own.items() if "weight" in name)
        if not weights:
            continue
        if all(each.ndim == 2 for each in weights):
            rows = sum(int(each.shape[0]) for each in weights[: 1 if grouped else None])
            sides = rows, int(weights[0].shape[-1])
        elif part or not all(type(side) is int for side in sides):
            gaps["network.linears"] = f"FSDP1 flattens the weights of {type(module).__qualname__}"
            continue
        layer = Layer(
            kind=kind,
            stack=STACK,
            use="training",
            in_features=sides[1],
            out_features=sides[0],
            weights=weights,
            dtype=dtype_name(weights[0]),
            bias=any(name.endswith("bias") and each.numel() for name, each in own.items()),
            part=part,
            gemms=len(weights) if grouped else 1,
            **record,
            weight_class=subclass(weights[0]),
            role="experts" if grouped else "body",
        )
        found.append(layer)
    return tuple(found)


def record_of(module: Any, gaps: dict[str, str]) -> dict[str, Any]:
    """Read ``engaged``, ``recipe`` and ``features`` of the last forward.

    ``fp8`` is set in every forward, and by a checkpoint's recomputation outside the autocast. So False means
    "not engaged" only without a trace of an earlier FP8 forward.
    """
    state, recipe = state_of(module), recipe_of(module)
    features: dict[str, bool | int | str | None] = {
        name: value  # they change kernels (2.8 to 2.20)
        for name in ("disable_rht", "disable_stochastic_rounding")
        if isinstance(value := read(recipe, name), bool)
    }
    if read(recipe, "fp8_dpa") or read(recipe, "fp8_mha"):
        features["fp8_attention"] = True
    if isinstance(format := read(read(recipe, "fp8_format"), "name"), str):
        features["fp8_format"] = format
    if "fp8" not in state or meta(module) is None:
        gaps["network.linears.engaged"] = (
            "this Transformer Engine module keeps no record where 1.0 to 2.20 do"
        )
        known = NOT_RECORDED if recipe is None else named(recipe)
        return {"engaged": NOT_RECORDED, "recipe": known, "features": features}
    ran = state.get("forwarded_at_least_once", True if state["fp8"] else None)
    engaged = True if ran and state["fp8"] else None
    if ran and not state["fp8"] and recipe is None and read(module, "training"):
        engaged = False
    config, ranks = read(module, "config"), read(module, "tp_size")
    features |= {
        "primary_weights_in_fp8": bool(state.get("primary_weights_in_fp8", False)),
        "fp8_ran_before": recipe is not None and not state["fp8"],
    }
    if read(config, "quant_recipe") and not (read(config, "fp8") or read(config, "fp4")):
        features["quant_recipe_alone"] = True
    if recomputes_in_bf16(config):
        features["recomputes_in_bf16"] = True
    if read(module, "sequence_parallel") is True and isinstance(ranks, int):
        features["sequence_ranks"] = ranks
    return {"engaged": engaged, "recipe": None if recipe is None else named(recipe), "features": features}


def recomputes_in_bf16(config: Any) -> bool:
    """Return whether Megatron's settings send FP8 modules through ``tensor_parallel.checkpoint``."""
    if read(config, "recompute_granularity") != "selective" or not read(config, "fp8"):
        return False
    modules = read(config, "recompute_modules") or ()
    in_fp8 = read(config, "fp8_dot_product_attention") or read(config, "fp8_multi_head_attention")
    return "gdn" in modules or ("core_attn" in modules and bool(in_fp8))


def named(recipe: Any) -> str:
    """Return a recipe's name; its class if fp8doctor does not know it.

    With ``backward_override`` (2.15), gradients are multiplied in 16 bits: no known recipe does that.
    """
    name = "CustomRecipe" if read(recipe, "backward_override") else type(recipe).__name__
    return by_class(STACK).get(name, name)


def recipe_of(module: nn.Module) -> Any:
    """Return the recipe of the module's last FP8 forward, or None."""
    return (meta(module) or meta_of_operation(module)).get("recipe")


def amax_group(module: nn.Module) -> tuple[bool, Any]:
    """Return if delayed scaling reduces its amax, and the group (None: all)."""
    recipe = recipe_of(module)
    if type(recipe).__name__ != "DelayedScaling" or not read(recipe, "reduce_amax"):
        return False, None
    return True, (meta(module) or {}).get("fp8_group")


def scaling(module: nn.Module) -> Scaling | None:
    """Return how a module scales, by the recipe of its last FP8 forward."""
    recipe = recipe_of(module)
    if recipe is None:
        return None
    format, history = read(read(recipe, "fp8_format"), "name", ""), read(recipe, "amax_history_len")
    algorithm = read(recipe, "amax_compute_algo")
    known = algorithm if isinstance(algorithm, str) else "custom" if callable(algorithm) else None
    return Scaling(
        stack=STACK,
        forward_dtypes=FORMATS.get(format, ())[:1],
        amax_history_len=history if isinstance(history, int) else None,
        amax_compute_algo=known,
    )


def casts(module: nn.Module) -> dict[str, Cast]:
    """Return a module's casts in its last FP8 forward, for recipes with one scale per tensor.

    Of a fused MLP: the first matmul's weight, the last one's gradient. A norm before the matmul hides its
    input.
    """
    recipe = recipe_of(module)
    name, format = type(recipe).__name__, read(read(recipe, "fp8_format"), "name", "HYBRID")
    kind = (ancestor(type(module), PREFIX, GEMM_MODULES) or "").rpartition(".")[2]
    known = name in ("DelayedScaling", "Float8CurrentScaling") and kind != "GroupedLinear"
    if not known or format not in FORMATS or not state_of(module).get("fp8"):
        return {}
    forward, backward = FORMATS[format]
    found = {}
    for operand, dtype in (("input", forward), ("weight", forward), ("gradient", backward)):
        kept = delayed(module, operand) if name == "DelayedScaling" else (None, None)
        if kept is not None and (operand != "input" or kind == "Linear"):
            found[operand] = Cast(dtype=dtype, scale=kept[0], history=kept[1])
    return found


class PlainLinear(nn.Linear):
    """``te.Linear`` as an nn.Linear over the same Parameters, which every tool and the compiler know.

    Attributes and outputs are as in 1.5, 2.1, 2.5 and 2.20. Outputs and gradients differ by less than 0.7%
    from 2.20.2 (H200, BF16).
    """

    def __init__(self, of: Any) -> None:
        nn.Module.__init__(self)
        for name, parameter in of._parameters.items():
            self.register_parameter(name, parameter)
        self.out_features, self.in_features = self.weight.shape
        self.returns_bias = bool(getattr(of, "return_bias", False))
        self.name = getattr(of, "name", None)
        """Read by ``te.MultiheadAttention`` in 2.20."""
        self.train(of.training)

    def forward(self, input: Tensor, *_: Any, **__: Any) -> Any:
        """Return the bias separately if TE does, which keeps an empty tensor for none."""
        bias = self._parameters.get("bias")
        bias = bias if bias is not None and bias.numel() else None
        if self.returns_bias:
            return functional.linear(input, self.weight), bias
        return functional.linear(input, self.weight, bias)


def bf16_counterpart(module: nn.Module) -> nn.Module:
    """Return an nn.Linear for a Linear, else switch FP8 off.

    Fused layers keep TE's kernels: six steps with theirs in plain torch, compiled by block, took 1.00x to
    1.02x as long (H200 and H100, torch 2.11, 2.20.2). So does a Linear with tensor parallelism, or with a
    forward of its own, as Megatron's.
    """
    if any(subclass(weight) for weight in module._parameters.values() if weight is not None):
        raise NoCounterpart(f"the weights of {type(module).__name__} are kept in FP8 alone")
    is_linear = (ancestor(type(module), PREFIX, GEMM_MODULES) or "").endswith(".Linear")
    own = next(each for each in type(module).__mro__ if "forward" in vars(each))
    plain_enough = own.__module__.startswith("transformer_engine.") and getattr(module, "tp_size", 1) <= 1
    whole = module._parameters.get("weight") is not None
    return PlainLinear(module) if is_linear and plain_enough and whole else without_fp8(module)


def without_fp8(module: nn.Module) -> nn.Module:
    """Switch FP8 off inside a fused layer.

    Dynamo traces none of them (LayerNormLinear, LayerNormMLP: 2.20). A graph break inside the autocast here
    would leave the rest of a compiled block eager: 131 ms in the place of 119 (a ViT, H200, torch 2.11).
    """
    closed = autocast()
    within(module, lambda: closed(enabled=False))
    module.__dict__["forward"] = torch.compiler.disable(module.__dict__["forward"])  # type: ignore[no-untyped-call]
    return module


def within(module: nn.Module, context: Callable[[], AbstractContextManager[Any]]) -> nn.Module:
    inner = module.forward

    def forward(*arguments: Any, **settings: Any) -> Any:
        with context():
            return inner(*arguments, **settings)

    module.__dict__["forward"] = forward
    return module


def autocast_with(recipe: Any) -> AbstractContextManager[Any]:
    """Open TE's autocast with a recipe. Raises `NoCounterpart`.

    The argument is ``recipe`` of ``te.autocast`` (2.9 to 2.20), or ``fp8_recipe`` of ``te.fp8_autocast`` (1.0
    to 2.20).
    """
    opened = autocast()
    name = "recipe" if "recipe" in inspect.signature(opened).parameters else "fp8_recipe"
    return opened(**{"enabled": True, name: recipe})


def autocast() -> Callable[..., AbstractContextManager[Any]]:
    """Return the loaded library's autocast. Raises `NoCounterpart`."""
    library = sys.modules.get("transformer_engine.pytorch")
    found = getattr(library, "autocast", None) or getattr(library, "fp8_autocast", None)
    if found is None:
        raise NoCounterpart("transformer_engine.pytorch is not loaded, or has no autocast")
    context: Callable[..., AbstractContextManager[Any]] = found
    return context


STATES = ("transformer_engine.pytorch.quantization", "transformer_engine.pytorch.fp8")
"""Modules of the process-wide FP8 state: from 2.9, and before."""

BUFFERS = ("global_amax_buffer", "global_amax_history_buffer", "global_scale_buffer")
"""Dicts of lists of tensors in the state, per autocast (1.0 to 2.20)."""

ENTERS = ("autocast_enter", "fp8_autocast_enter")
"""The manager's method that opens an autocast: from 2.9, and before. Its third argument is the recipe, its
first the switch (1.0 to 2.20)."""


def state_manager() -> Any:
    """Return the class that manages FP8 in the process, or None (1.0 to 2.20)."""
    managers = (getattr(sys.modules.get(name), "FP8GlobalStateManager", None) for name in STATES)
    return next((each for each in managers if each is not None), None)


def state() -> Any:
    """Return the FP8 state: the manager up to 2.14, an instance from 2.15; or None."""
    manager = state_manager()
    return getattr(manager, "quantization_state", manager)


def autocast_is_open() -> bool:
    """Tell if a module called now would run in FP8 (1.0 to 2.20)."""
    enabled = getattr(state_manager(), "is_fp8_enabled", None)
    return enabled is not None and bool(enabled())


def open_recipe() -> Any:
    """Return the open autocast's recipe (1.0 to 2.20)."""
    return state_manager().get_fp8_recipe()


def recipe_test() -> Any:
    """Return the function that raises if this GPU cannot run a recipe, or None (1.0 to 2.20)."""
    home = sys.modules.get(getattr(state_manager(), "__module__", ""))
    return getattr(home, "check_recipe_support", None)


def meta(module: nn.Module) -> dict[str, Any] | None:
    """Return a module's record of its scaling, or None (1.0 to 2.20)."""
    found = state_of(module).get("fp8_meta")
    return found if isinstance(found, dict) else None


def meta_of_operation(module: nn.Module) -> dict[str, Any]:
    """Return the record of a ``te.ops`` operation's last FP8 forward (1.9 to 2.20)."""
    return (state_of(module).get("_fp8_metas") or {}).get("forward") or {}


def delayed(module: nn.Module, operand: str) -> tuple[Any, Any] | None:
    """Return scale in use and amax history of a delayed cast, or None (2.0 to 2.20).

    A matmul has three places forward (input, weight, output), and two backward, of which the first is the
    gradient. Of a fused MLP: the first matmul's input and weight, the second's gradient.
    """
    known = meta(module) or {}
    state = known.get("scaling_bwd" if operand == "gradient" else "scaling_fwd")
    scale, history = getattr(state, "scale", None), getattr(state, "amax_history", None)
    if scale is None or history is None:
        return None
    place = 2 * (int(known.get("num_gemms", 1)) - 1) if operand == "gradient" else OPERANDS.index(operand)
    return scale[place], history[:, place]


OPERANDS = ("input", "weight")
"""Order of a matmul's forward scales (2.0 to 2.20)."""
