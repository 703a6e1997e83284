"""DINOv2 large as a vision tower: rowwise FP8, eager."""

from __future__ import annotations

import torch
from plain import DEVICE, built, changes, size, to_float8
from torch import nn
from torch.nn import functional
from transformers import Dinov2Config, Dinov2Model

LAYERS, WIDTH, HEADS, BATCH, SIDE = size((24, 1024, 16, 32, 224), (2, 64, 4, 2, 56))
VARIANTS = changes("encoder.layer", skip=())


def build_model() -> nn.Module:
    config = Dinov2Config(
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        image_size=SIDE,
        patch_size=14,
    )
    with built():
        model = Dinov2Model(config)
    return to_float8(model.train(), "rowwise", skip=())


def example_batch() -> torch.Tensor:
    return torch.randn(BATCH, 3, SIDE, SIDE, device=DEVICE, dtype=torch.bfloat16)


def loss(output: object, batch: torch.Tensor) -> torch.Tensor:
    """Take another tower's features to be those of the next image."""
    features = output.last_hidden_state[:, 0].float()
    return 1 - functional.cosine_similarity(features, features.detach().roll(1, 0)).mean()
