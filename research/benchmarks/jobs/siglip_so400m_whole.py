"""SigLIP's SO400M vision tower: tensorwise FP8, compiled as a whole."""

from __future__ import annotations

import torch
from plain import DEVICE, built, changes, size, to_float8
from torch import nn
from torch.nn import functional
from transformers import SiglipVisionConfig, SiglipVisionModel

COLD_S = 120.0
LAYERS, WIDTH, INNER, HEADS, BATCH, SIDE = size((27, 1152, 4304, 16, 32, 384), (2, 64, 128, 4, 2, 56))
SKIP = ("head",)
CONFIG = SiglipVisionConfig(
    hidden_size=WIDTH,
    intermediate_size=INNER,
    num_hidden_layers=LAYERS,
    num_attention_heads=HEADS,
    image_size=SIDE,
    patch_size=14,
)


def blocks() -> str:
    """Name the list of blocks: it moved up between versions of transformers."""
    with torch.device("meta"):
        modules = SiglipVisionModel(CONFIG).named_modules()
    return next(name for name, module in modules if isinstance(module, nn.ModuleList))


VARIANTS = changes(blocks(), skip=SKIP, as_compiled=True)


def build_model() -> nn.Module:
    with built():
        model = to_float8(SiglipVisionModel(CONFIG).train(), skip=SKIP)
    return torch.compile(model)


def example_batch() -> torch.Tensor:
    return torch.randn(BATCH, 3, SIDE, SIDE, device=DEVICE, dtype=torch.bfloat16)


def loss(output: object, batch: torch.Tensor) -> torch.Tensor:
    """Take another tower's features to be those of the next image."""
    features = output.pooler_output.float()
    return 1 - functional.cosine_similarity(features, features.detach().roll(1, 0)).mean()
