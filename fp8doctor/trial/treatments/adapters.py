"""adapters-to-bf16: LoRA's matrices in the dtype of the base. And the step without them, to see what they
cost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fp8doctor.stacks.lineage import lineage
from fp8doctor.trial.treatments.precision import with_parameters
from fp8doctor.trial.treatments.registry import NotTried, TreatmentContext, modules
from fp8doctor.trial.variant import Variant


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

    A measurement, no treatment. The gradient starts at the embedding, outside of what is compiled block by
    block, and so it goes through the projections of the first block too. PEFT's own switch would freeze the
    Parameters, which all arms share. Its flag is set as the switch sets it (``_disable_adapters`` of a
    ``BaseTunerLayer``, PEFT 0.10 to 0.21), or torchtune's (``disabled`` of a ``LoRALinear``).
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
    """Name the attribute that switches the adapters of this module off; None for every other module."""
    names = {(where.partition(".")[0], name) for where, name in lineage(type(module))}
    if ("peft", "BaseTunerLayer") in names and hasattr(module, "_disable_adapters"):
        return "_disable_adapters"
    return "disabled" if ("torchtune", "LoRALinear") in names and hasattr(module, "disabled") else None


def _require_grad(module: nn.Module, arguments: Any, output: torch.Tensor) -> torch.Tensor:
    return output.requires_grad_(True) if output.is_leaf else output
