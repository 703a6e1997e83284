"""timm's ViT-H/14, its blocks in FP8, eager."""

from __future__ import annotations

import timm
import torch
from plain import DEVICE, built, changes, size, to_float8
from torch import nn
from torch.nn import functional

NEEDS = ("timm",)
NAME, BATCH, CLASSES = size(("vit_huge_patch14_224", 64, 1000), ("vit_tiny_patch16_224", 2, 16))
VARIANTS = changes("blocks", skip=("head", "patch_embed"))


def build_model() -> nn.Module:
    with built():
        model = timm.create_model(NAME, num_classes=CLASSES)
    return to_float8(model.train(), skip=("head", "patch_embed"))


def example_batch() -> torch.Tensor:
    return torch.randn(BATCH, 3, 224, 224, device=DEVICE, dtype=torch.bfloat16)


def loss(output: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    classes = torch.arange(len(output), device=output.device) % CLASSES
    return functional.cross_entropy(output.float(), classes)
