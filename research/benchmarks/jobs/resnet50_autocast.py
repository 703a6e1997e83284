"""torchvision's ResNet-50, channels last, fp32 weights under autocast to BF16, eager: nothing in it but the
classifier could be in FP8, and that is 1,000 wide."""

from __future__ import annotations

import torch
from plain import DEVICE, changes, size
from torch import nn
from torch.nn import functional
from torchvision.models import resnet50

NEEDS = ("torchvision",)
RECIPE = None
BATCH, SIDE = size((192, 224), (2, 64))
VARIANTS = changes()
autocast = torch.bfloat16


def build_model() -> nn.Module:
    return resnet50().train().to(DEVICE, memory_format=torch.channels_last)


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)


def example_batch() -> torch.Tensor:
    return torch.randn(BATCH, 3, SIDE, SIDE, device=DEVICE).to(memory_format=torch.channels_last)


def loss(output: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output.float(), torch.arange(len(batch), device=output.device))
