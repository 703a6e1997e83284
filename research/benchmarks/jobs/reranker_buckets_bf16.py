"""A BERT-base cross-encoder that ranks passages; a step runs three buckets of short pairs, each of its own
length. BF16, eager, the host sets the pace: what would FP8 give?"""

from __future__ import annotations

import torch
from plain import DEVICE, built, changes, size
from torch import nn
from torch.nn import functional
from transformers import BertConfig, BertForSequenceClassification

RECIPE = None
WHOLE = False
LAYERS, WIDTH, INNER, HEADS = size((12, 768, 3072, 12), (2, 64, 128, 4))
VOCABULARY, BUCKETS = size((30522, ((64, 48), (48, 64), (32, 96))), (256, ((4, 16), (2, 32))))
VARIANTS = changes("bert.encoder.layer", skip=("classifier",))


def build_model() -> nn.Module:
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=INNER,
        num_labels=1,
    )
    with built():
        return BertForSequenceClassification(config).train()


def example_batch() -> list[dict[str, torch.Tensor]]:
    return [
        {
            "input_ids": torch.randint(0, VOCABULARY, shape, device=DEVICE),
            "attention_mask": torch.ones(shape, dtype=torch.long, device=DEVICE),
            "right": torch.randint(0, 2, shape[:1], device=DEVICE),
        }
        for shape in BUCKETS
    ]


def training_step(model: nn.Module, batch: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    total = torch.zeros((), device=DEVICE)
    for bucket in batch:
        told = model(bucket["input_ids"], attention_mask=bucket["attention_mask"]).logits[:, 0]
        total = total + functional.binary_cross_entropy_with_logits(told.float(), bucket["right"].float())
    return total / len(batch)
