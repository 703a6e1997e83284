"""ViT-MAE large in fp32 under autocast, eager, no FP8: a quarter of the patches, then a narrow decoder."""

from __future__ import annotations

import torch
from plain import DEVICE, built, changes, size
from torch import nn
from transformers import ViTMAEConfig, ViTMAEForPreTraining

LAYERS, WIDTH, INNER, HEADS = size((24, 1024, 4096, 16), (2, 64, 128, 4))
DECODER, DEPTH, BATCH, SIDE = size((512, 8, 128, 224), (32, 2, 2, 64))
VARIANTS = changes("*", skip=("pred",))
autocast = torch.bfloat16


def build_model() -> nn.Module:
    config = ViTMAEConfig(
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=INNER,
        decoder_hidden_size=DECODER,
        decoder_num_hidden_layers=DEPTH,
        decoder_num_attention_heads=HEADS,
        decoder_intermediate_size=4 * DECODER,
        image_size=SIDE,
        patch_size=16,
    )
    with built(torch.float32):
        return ViTMAEForPreTraining(config).train()


def example_batch() -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(BATCH, 3, SIDE, SIDE, device=DEVICE)}
