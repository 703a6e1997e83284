"""Run the step, its parameters or its adapters in BF16 instead of fp32, or without its adapters."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fp8doctor.stacks.lineage import lineage
from fp8doctor.trial.treatments.apply import NotTried, TreatmentContext, modules
from fp8doctor.trial.variant import Variant


def autocast_bf16(variant: Variant, context: TreatmentContext) -> Variant:
    """Run forward and loss under autocast, and leave the parameters as they are."""
    if variant.autocast is not None:
        raise NotTried(
            f"the step runs under autocast already ({str(variant.autocast).removeprefix('torch.')})"
        )
    return replace(variant, autocast=torch.bfloat16)


def bf16_parameters(variant: Variant, context: TreatmentContext) -> Variant:
    """Turn every fp32 parameter, and every fp32 tensor of the batch, into BF16; buffers stay."""
    if not with_parameters(variant.model.modules(), torch.float32, torch.bfloat16):
        raise NotTried("it has no parameter in fp32")
    return replace(variant, batch=in_bf16(variant.batch))


def mostly_fp32(model: nn.Module) -> bool:
    """Whether more than half of the parameters are fp32."""
    sizes = [(parameter.dtype == torch.float32, parameter.numel()) for parameter in model.parameters()]
    return 2 * sum(size for fp32, size in sizes if fp32) > sum(size for _, size in sizes)


def with_parameters(modules: Iterable[nn.Module], old: torch.dtype, new: torch.dtype) -> int:
    """Replace every Parameter of dtype ``old`` by one of ``new``, keep ties, and return how many.

    The old ones are not written to: other variants share them.
    """
    made: dict[int, nn.Parameter] = {}
    for module in modules:
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.dtype == old:
                if id(parameter) not in made:
                    made[id(parameter)] = nn.Parameter(
                        parameter.detach().to(new), requires_grad=parameter.requires_grad
                    )
                module._parameters[name] = made[id(parameter)]
    return len(made)


def in_bf16(batch: Any) -> Any:
    """Turn the fp32 tensors of the batch into BF16."""
    if isinstance(batch, torch.Tensor):
        return batch.bfloat16() if batch.dtype == torch.float32 else batch
    if isinstance(batch, dict):
        return {key: in_bf16(value) for key, value in batch.items()}
    return type(batch)(in_bf16(value) for value in batch) if type(batch) in (list, tuple) else batch


def adapters_to_bf16(variant: Variant, context: TreatmentContext) -> Variant:
    """Turn every fp32 Parameter inside an adapter into a BF16 one."""
    names = {linear.name for linear in context.facts.network.linears if linear.adapter == "adapter"}
    inside = {
        name: module
        for name, module in modules(variant.model).items()
        if any(name == each or name.startswith(f"{each}.") for each in names)
    }
    if not with_parameters(inside.values(), torch.float32, torch.bfloat16):
        raise NotTried("it has no adapter in fp32")
    return variant


def without_adapters(variant: Variant) -> Variant:
    """Skip the adapters, with the gradient of the activations computed as if they were there.

    This is a measurement, not a treatment. The gradient starts at the embedding, outside the compiled blocks,
    so it also passes the projections of the first block. PEFT's own switch would freeze the Parameters, which
    all variants share, so only its flag is set (``_disable_adapters`` of a ``BaseTunerLayer``, PEFT 0.10 to
    0.21), or torchtune's (``disabled`` of a ``LoRALinear``).
    """
    found = 0
    for module in variant.model.modules():
        flag = _switch(module)
        if flag is not None:
            setattr(module, flag, True)
            found += 1
    embedding = next((module for module in variant.model.modules() if isinstance(module, nn.Embedding)), None)
    if not found:
        raise NotTried("its adapters have no switch that is known here")
    if embedding is None:
        raise NotTried("it has no embedding from which the gradient could start when the adapters are off")
    embedding.register_forward_hook(_require_grad)
    return replace(variant)


def _switch(module: Any) -> str | None:
    """Name the attribute that switches this module's adapters off; None if it has none."""
    names = {(where.partition(".")[0], name) for where, name in lineage(type(module))}
    if ("peft", "BaseTunerLayer") in names and hasattr(module, "_disable_adapters"):
        return "_disable_adapters"
    return "disabled" if ("torchtune", "LoRALinear") in names and hasattr(module, "disabled") else None


def _require_grad(module: nn.Module, arguments: Any, output: torch.Tensor) -> torch.Tensor:
    return output.requires_grad_(True) if output.is_leaf else output
