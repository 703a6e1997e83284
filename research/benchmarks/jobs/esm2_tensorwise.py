"""ESM-2 3B's width, cut at 8 layers: an encoder of proteins whose every Linear but the head is in tensorwise
FP8, eager, torch's AdamW as it comes."""

from __future__ import annotations

import torch
from plain import DEVICE, adamw, built, changes, size, to_float8
from torch import nn
from transformers import EsmConfig, EsmForMaskedLM

RECIPE = "tensorwise"
WHOLE = False
LAYERS, WIDTH, HEADS = size((8, 2560, 40), (3, 64, 4))
VOCABULARY, BATCH, LENGTH = size((33, 16, 1024), (33, 2, 32))
SKIP = ("lm_head",)
VARIANTS = changes("esm.encoder.layer", skip=SKIP)
build_optimizer = adamw


def build_model() -> nn.Module:
    config = EsmConfig(
        hidden_size=WIDTH,
        intermediate_size=4 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        vocab_size=VOCABULARY,
        mask_token_id=32,
        pad_token_id=1,
        max_position_embeddings=LENGTH + 2,
        position_embedding_type="rotary",
        token_dropout=False,
    )
    with built():
        model = EsmForMaskedLM(config).train()
    return to_float8(model, skip=SKIP)


def example_batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(4, VOCABULARY - 1, (BATCH, LENGTH), device=DEVICE)
    return {"input_ids": ids, "labels": ids}
