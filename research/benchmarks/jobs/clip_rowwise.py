"""CLIP with a contrastive loss over two towers of unlike widths, FP8 rowwise, eager."""

from __future__ import annotations

import torch
from plain import DEVICE, built, changes, size, to_float8
from torch import nn
from transformers import CLIPConfig, CLIPModel

VISION, TEXT = size(((12, 1024, 4096, 16), (6, 768, 3072, 12)), ((2, 64, 128, 4), (2, 32, 64, 4)))
SIDE, PATCH, VOCABULARY, WORDS, BATCH = size((224, 14, 49408, 77, 128), (32, 16, 512, 16, 4))
SKIP = ("projection",)
VARIANTS = changes("*", skip=SKIP)


def tower(layers: int, width: int, inner: int, heads: int) -> dict[str, int]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_attention_heads": heads,
    }


def build_model() -> nn.Module:
    config = CLIPConfig(
        text_config=tower(*TEXT)
        | {
            "vocab_size": VOCABULARY,
            "max_position_embeddings": WORDS,
            "eos_token_id": VOCABULARY - 1,
            "bos_token_id": 0,
        },
        vision_config=tower(*VISION) | {"image_size": SIDE, "patch_size": PATCH},
        projection_dim=TEXT[1],
    )
    with built():
        model = CLIPModel(config).train()
    return to_float8(model, "rowwise", skip=SKIP)


def example_batch() -> dict[str, object]:
    return {
        "input_ids": torch.randint(0, VOCABULARY, (BATCH, WORDS), device=DEVICE),
        "pixel_values": torch.randn(BATCH, 3, SIDE, SIDE, device=DEVICE, dtype=torch.bfloat16),
        "return_loss": True,
    }
