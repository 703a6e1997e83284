"""DeepSpeed's optimizer around torch's, in as far as it is looked at: what it holds, and where.

As `DeepSpeedZeroOptimizer` of DeepSpeed 0.19.8 on one process, read there and compared with it on a CPU.
"""

from typing import Any

import torch
from torch import nn


class ZeroOptimizer:
    """Gives torch's optimizer one flat copy of each group in fp32, and writes it back after its step."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.bit16_groups = [list(group["params"]) for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            flat = torch.cat([each.detach().float().flatten() for each in group["params"]])
            group["params"] = [flat.requires_grad_()]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    def step(self) -> None:
        for group, own in zip(self.param_groups, self.bit16_groups, strict=True):
            (flat,) = group["params"]
            gradients = [torch.zeros_like(each) if each.grad is None else each.grad for each in own]
            flat.grad = torch.cat([each.float().flatten() for each in gradients])
        self.optimizer.step()
        for group, own in zip(self.param_groups, self.bit16_groups, strict=True):
            parts = group["params"][0].detach().split([each.numel() for each in own])
            for each, part in zip(own, parts, strict=True):
                each.data.copy_(part.view_as(each))

    def zero_grad(self) -> None:
        for each in (each for own in self.bit16_groups for each in own):
            each.grad = None


def partition(parameter: nn.Parameter) -> None:
    """Take the data of a parameter away, as ZeRO-3 does between two uses."""
    parameter.ds_numel, parameter.ds_shape = parameter.numel(), parameter.shape  # type: ignore[attr-defined]
    parameter.data = torch.empty(0, dtype=parameter.dtype)
