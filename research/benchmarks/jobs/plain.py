"""What the jobs share: small sizes to try the tool with, and the changes that a user would make by hand.

Plain PyTorch and torchao. A change takes the model that the job built and returns it, over the same
Parameters.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import torch
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.float8.float8_linear import Float8Linear
from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor

TINY = os.environ.get("TRIAL_JOBS_TINY") == "1"
"""Whether the jobs are built small enough for a CPU."""

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
MULTIPLE = 16
"""Both sides of a weight have to be multiples of it for FP8."""

Change = Callable[..., nn.Module]
Value = TypeVar("Value")


def size(full: Value, tiny: Value) -> Value:
    """Choose between the job's size and the one to try the tool with."""
    return tiny if TINY else full


def gpu_gib() -> float:
    """Tell the memory of the GPU; 0 without one."""
    return torch.cuda.get_device_properties(0).total_memory / 2**30 if torch.cuda.is_available() else 0.0


@contextmanager
def built(dtype: torch.dtype = torch.bfloat16) -> Iterator[None]:
    """Build in this dtype on the GPU."""
    torch.set_default_dtype(dtype)
    try:
        with torch.device(DEVICE):
            yield
    finally:
        torch.set_default_dtype(torch.float32)


def tokens(vocabulary: int, batch: int, length: int) -> dict[str, torch.Tensor]:
    """Make a batch of a causal language model."""
    ids = torch.randint(0, vocabulary, (batch, length), device=DEVICE)
    return {"input_ids": ids, "labels": ids}


def to_float8(
    model: nn.Module, recipe: str = "tensorwise", skip: Collection[str] = ("lm_head",)
) -> nn.Module:
    """Convert every Linear whose name holds none of ``skip``."""

    def wanted(layer: nn.Module, name: str) -> bool:
        return not any(part in name for part in skip) and all(
            side % MULTIPLE == 0 for side in layer.weight.shape
        )

    config = Float8LinearConfig.from_recipe_name(recipe)
    return convert_to_float8_training(model, config=config, module_filter_fn=wanted)


def in_bf16(model: nn.Module, only: Collection[str] | None = None) -> nn.Module:
    """Put an nn.Linear over the same weight in the place of every Float8Linear, or of those named."""
    for above, parent in list(model.named_modules()):
        for name, child in list(parent.named_children()):
            full = f"{above}.{name}".removeprefix(".").replace("_orig_mod.", "")
            if isinstance(child, Float8Linear) and (only is None or full in only):
                with torch.device("meta"):
                    linear = nn.Linear(child.in_features, child.out_features, bias=child.bias is not None)
                linear.weight, linear.bias = without_wrapper(child.weight), child.bias
                setattr(parent, name, linear)
    return model


def without_wrapper(weight: nn.Parameter) -> nn.Parameter:
    """Take off what the conversion wraps a weight in for FSDP2's all-gather: a layer that was never converted
    has none, and every operation on it costs the host more."""
    wrapped = isinstance(weight, WeightWithDynamicFloat8CastTensor)
    return nn.Parameter(weight._tensor.detach(), weight.requires_grad) if wrapped else weight


def with_recipe(model: nn.Module, recipe: str) -> nn.Module:
    """Convert the same layers with another recipe."""
    names = {name for name, module in model.named_modules() if isinstance(module, Float8Linear)}
    config = Float8LinearConfig.from_recipe_name(recipe)
    return convert_to_float8_training(
        in_bf16(model), config=config, module_filter_fn=lambda layer, name: name in names
    )


def uncompiled(model: nn.Module) -> nn.Module:
    """Take ``torch.compile(model)``, ``model.compile()`` and ``block.compile()`` off."""
    model = getattr(model, "_orig_mod", model)
    for module in model.modules():
        module._compiled_call_impl = None
    return model


def by_block(model: nn.Module, lists: Collection[str], **settings: str | bool) -> nn.Module:
    """Compile every block of these lists (``*``: all) in place, without a KV cache as printed lines do."""
    model = without_cache(uncompiled(model))
    if "*" in lists:
        lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    for name in lists:
        for block in model.get_submodule(name).children():
            block.compile(**settings)
    return model


def as_a_whole(model: nn.Module) -> nn.Module:
    """Compile the model in place."""
    model = uncompiled(model)
    model.compile()
    return model


def with_bf16_adapters(model: nn.Module) -> nn.Module:
    """Hold LoRA's matrices in BF16."""
    for name, weight in model.named_parameters():
        if "lora_" in name:
            weight.data = weight.data.to(torch.bfloat16)
    return model


def without_cache(model: nn.Module) -> nn.Module:
    """Build no KV cache: with it each block is a version of its own to the compiler."""
    if getattr(getattr(model, "config", None), "use_cache", False):
        model.config.use_cache = False
    return model


def unchanged(model: nn.Module) -> nn.Module:
    """Leave the model as the job built it."""
    return model


def without_checkpointing(model: nn.Module) -> nn.Module:
    """Switch off what ``gradient_checkpointing_enable`` switched on."""
    model.gradient_checkpointing_disable()
    return model


def with_fused_optimizer(model: nn.Module) -> nn.Module:
    """Let `adamw` be fused."""
    model.fused_optimizer = True
    return model


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Build AdamW as most scripts do, which is not fused."""
    trained = [each for each in model.parameters() if each.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-5, fused=getattr(model, "fused_optimizer", None))


def with_sdpa(model: nn.Module) -> nn.Module:
    """Switch transformers' attention to torch's."""
    model.set_attn_implementation("sdpa")
    return model


def changes(
    *lists: str, skip: Collection[str] = ("lm_head",), as_compiled: bool = False
) -> dict[str, Change]:
    """List what can be changed in a job by hand, by the name of the trial's arm or treatment.

    ``lists`` name the repeated blocks, without which the model is compiled as a whole, ``skip`` what a
    conversion leaves out; ``as_compiled`` says that the job compiles itself in another form.
    """
    compiled: Change = partial(by_block, lists=lists) if lists else as_a_whole
    found: dict[str, Change] = {
        "as_is": unchanged,
        "bf16": lambda model: in_bf16(uncompiled(model)),
        "bf16_compiled": lambda model: compiled(in_bf16(model)),
        "compile-blocks": compiled,
        "compile-model": as_a_whole,
        "cuda-graphs": partial(by_block, lists=lists, mode="reduce-overhead"),
        "checkpointing-off": without_checkpointing,
        "fused-optimizer": with_fused_optimizer,
        "attention-sdpa": with_sdpa,
        "cache-off": without_cache,
        "adapters-to-bf16": with_bf16_adapters,
        "keep-in-bf16": in_bf16,
    }
    for recipe in RECIPES:
        name = recipe.replace("_", "-")
        found[f"recipe-{name}"] = partial(with_recipe, recipe=recipe)
        found[f"convert-{name}"] = partial(to_float8, recipe=recipe, skip=skip)
    if as_compiled:
        found["bf16_as_compiled"] = in_bf16
    return found
