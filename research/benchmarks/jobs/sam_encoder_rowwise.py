"""SAM's image encoder of the huge one's width, cut at 8 layers: windows of 14 x 14 with relative positions,
two layers over the whole image, images of 1,024 x 1,024. Rowwise FP8, eager."""

from __future__ import annotations

import torch
from plain import DEVICE, built, changes, size, to_float8
from torch import nn
from transformers import SamVisionConfig, SamVisionModel

RECIPE = "rowwise"
WHOLE = False
LAYERS, WIDTH, HEADS, SIDE, BATCH = size((8, 1280, 16, 1024, 8), (2, 64, 4, 64, 2))
WHOLE_IMAGE = size((3, 7), (1,))
VARIANTS = changes("vision_encoder.layers", skip=())


def build_model() -> nn.Module:
    config = SamVisionConfig(
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        image_size=SIDE,
        global_attn_indexes=list(WHOLE_IMAGE),
        window_size=size(14, 2),
        mlp_dim=4 * WIDTH,
    )
    with built():
        model = SamVisionModel(config).train()
    return to_float8(model, "rowwise", skip=())


def example_batch() -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(BATCH, 3, SIDE, SIDE, device=DEVICE, dtype=torch.bfloat16)}


def loss(output: object, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return output.last_hidden_state.float().square().mean()
