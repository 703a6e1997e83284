"""autocast-bf16, bf16-parameters: two ways out of fp32."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fp8doctor.trial.treatments.registry import NotTried, TreatmentContext
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
    """Replace every Parameter of dtype ``old`` by one of ``new``, ties kept; return how many there were.

    The old ones are not written to: other arms share them.
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
