"""timm's ConvNeXt of the large one's widths, cut at 12 blocks, channels last: Linears of four widths in
tensorwise FP8, ``torch.compile(model)``."""

from __future__ import annotations

import torch
from plain import DEVICE, changes, size, to_float8
from timm.models.convnext import ConvNeXt
from torch import nn
from torch.nn import functional

RECIPE = "tensorwise"
DEPTHS, WIDTHS = size(((2, 2, 6, 2), (192, 384, 768, 1536)), ((1, 1, 2, 1), (32, 32, 64, 64)))
BATCH, SIDE = size((64, 224), (2, 64))
SKIP = ("head",)
VARIANTS = changes(*(f"stages.{stage}.blocks" for stage in range(4)), skip=SKIP, as_compiled=True)


def build_model() -> nn.Module:
    model = ConvNeXt(depths=DEPTHS, dims=WIDTHS).train()
    model = model.to(DEVICE, torch.bfloat16, memory_format=torch.channels_last)
    return torch.compile(to_float8(model, skip=SKIP))


def example_batch() -> torch.Tensor:
    images = torch.randn(BATCH, 3, SIDE, SIDE, device=DEVICE, dtype=torch.bfloat16)
    return images.to(memory_format=torch.channels_last)


def loss(output: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    """Take every image to be of a class of its own."""
    return functional.cross_entropy(output.float(), torch.arange(len(batch), device=output.device))
