"""transformers' Audio Spectrogram Transformer, 1,024 wide, on 10 s of audio: tensorwise FP8 but for the
classifier, compiled by block."""

from __future__ import annotations

import torch
from plain import DEVICE, built, by_block, changes, size, to_float8
from torch import nn
from transformers import ASTConfig, ASTForAudioClassification

RECIPE = "tensorwise"
WHOLE = False
LAYERS, WIDTH, INNER, HEADS = size((12, 1024, 4096, 16), (2, 64, 128, 4))
BINS, FRAMES, CLASSES, BATCH = size((128, 1024, 527, 24), (16, 64, 16, 2))
SKIP = ("classifier",)
VARIANTS = changes("*", skip=SKIP)


def build_model() -> nn.Module:
    config = ASTConfig(
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=INNER,
        max_length=FRAMES,
        num_mel_bins=BINS,
        num_labels=CLASSES,
    )
    with built():
        model = ASTForAudioClassification(config).train()
    return by_block(to_float8(model, "tensorwise", skip=SKIP), ("*",))


def example_batch() -> dict[str, torch.Tensor]:
    return {
        "input_values": torch.randn(BATCH, FRAMES, BINS, device=DEVICE, dtype=torch.bfloat16),
        "labels": torch.randint(0, CLASSES, (BATCH,), device=DEVICE),
    }
