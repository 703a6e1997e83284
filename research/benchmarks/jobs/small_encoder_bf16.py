"""A BERT 512 wide over short sentences in BF16, eager: FP8 gives nothing."""

from __future__ import annotations

import torch
from plain import DEVICE, built, changes, size
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

LAYERS, WIDTH, INNER, HEADS = size((8, 512, 2048, 8), (2, 64, 128, 4))
VOCABULARY, BATCH, LENGTH = size((30522, 64, 64), (256, 2, 16))
VARIANTS = changes("bert.encoder.layer", skip=("classifier", "pooler"))


def build_model() -> nn.Module:
    config = BertConfig(
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=INNER,
        vocab_size=VOCABULARY,
        num_labels=2,
    )
    with built():
        return BertForSequenceClassification(config).train()


def example_batch() -> dict[str, torch.Tensor]:
    return {
        "input_ids": torch.randint(0, VOCABULARY, (BATCH, LENGTH), device=DEVICE),
        "attention_mask": torch.ones(BATCH, LENGTH, dtype=torch.long, device=DEVICE),
        "labels": torch.randint(0, 2, (BATCH,), device=DEVICE),
    }
