"""What can be done to a replica: take FP8 out, put it in, compile.

Each takes a replica, changes it and returns it; one that cannot be done raises `NotTried` with the
reason. `fp8doctor.trial.arms` maps the names of findings' treatments to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from torch import nn

from fp8doctor.stacks import recognise
from fp8doctor.trial.compiling import is_wrapper

ALIGNMENT = 16
"""Elements to which both dimensions of an FP8 GEMM operand must be aligned. Source: ``torch._scaled_mm``."""


TE_LINEAR = "transformer_engine.pytorch.module.linear.Linear"
"""The one Transformer Engine layer that is a Linear and nothing else; the fused ones hold a norm or an activation too."""


class NotTried(Exception):
    """The treatment does not apply to this model or cannot be carried out here; the message says why."""


def strip_compile_marks(model: nn.Module) -> nn.Module:
    """``model`` without any compile mark, in place; the module inside when the root is a ``torch.compile`` wrapper."""
    while is_wrapper(model):
        model = model._orig_mod  # type: ignore[assignment]
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if is_wrapper(child):
                setattr(parent, name, child._orig_mod)
    for module in model.modules():
        module._compiled_call_impl = None
        forward = module.__dict__.get("forward")
        original = getattr(forward, "_torchdynamo_orig_callable", None)
        if original is not None:
            module.__dict__["forward"] = original
        decorated = getattr(type(module).forward, "_torchdynamo_orig_callable", None)
        if decorated is not None:
            module.__class__ = type(type(module).__name__, (type(module),), {"forward": decorated, "__module__": type(module).__module__})
    return model


def compile_blocks(model: nn.Module, lists: Sequence[str]) -> nn.Module:
    """Compile every block of the lists, or the whole model when it has none."""
    model = strip_compile_marks(model)
    blocks = [block for name in lists for block in model.get_submodule(name).children()]
    for module in blocks or [model]:
        module.compile()
    return model


def to_bf16(model: nn.Module) -> nn.Module:
    """Every FP8 training layer replaced by an ordinary Linear over the same parameters."""
    if (twin := _twin(model)) is not None:
        return twin
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if (twin := _twin(child)) is not None:
                setattr(parent, name, twin)
    return model


def _twin(module: nn.Module) -> nn.Module | None:
    traits = next((each for each in recognise(module, {}) if each.use != "none"), None)
    if traits is None:
        return None
    if traits.use == "storage":
        raise NotTried(f"its weights are stored in low precision ({type(module).__name__})")
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    is_linear = isinstance(module, nn.Linear) or traits.kind == TE_LINEAR
    if not is_linear or not isinstance(weight, nn.Parameter) or traits.weight_class is not None:
        raise NotTried(f"there is no BF16 form of {type(module).__name__} yet")
    own_bias = bias if isinstance(bias, nn.Parameter) and bias.numel() > 0 else None
    twin = nn.Linear(weight.shape[1], weight.shape[0], bias=own_bias is not None, device="meta", dtype=weight.dtype)
    twin.weight = weight
    if own_bias is not None:
        twin.bias = own_bias
    return twin.train(module.training)


def to_float8(model: nn.Module, recipe: str, skip: Sequence[str] = ()) -> nn.Module:
    """Every aligned nn.Linear converted by torchao with ``recipe``, but the layers named in ``skip``."""
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training  # type: ignore[import-untyped]
    except ImportError as error:
        raise NotTried(f"torchao cannot be imported ({error})") from None

    def wanted(module: nn.Module, name: str) -> bool:
        return name not in skip and all(size % ALIGNMENT == 0 for size in module.weight.shape)  # type: ignore[union-attr]

    converted = cast(nn.Module, convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name(recipe), module_filter_fn=wanted))
    if not any(layer.use == "training" for module in converted.modules() for layer in recognise(module, {})):
        raise NotTried("it has no nn.Linear that torchao could convert")
    return converted
