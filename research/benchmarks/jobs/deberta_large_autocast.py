"""DeBERTa v3 large as a classifier: fp32 weights under autocast to BF16, tensorwise FP8, eager."""

from __future__ import annotations

import torch
from plain import DEVICE, changes, size, to_float8
from torch import nn
from transformers import DebertaV2Config, DebertaV2ForSequenceClassification

RECIPE = "tensorwise"
LAYERS, WIDTH, INNER, HEADS = size((24, 1024, 4096, 16), (2, 64, 128, 4))
VOCABULARY, CLASSES, BATCH, LENGTH = size((128100, 3, 16, 256), (250, 3, 2, 32))
SKIP = ("classifier", "pooler")
VARIANTS = changes("deberta.encoder.layer", skip=SKIP)
autocast = torch.bfloat16


def build_model() -> nn.Module:
    config = DebertaV2Config(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=INNER,
        type_vocab_size=0,
        relative_attention=True,
        position_buckets=256,
        norm_rel_ebd="layer_norm",
        share_att_key=True,
        pos_att_type=["p2c", "c2p"],
        position_biased_input=False,
        max_position_embeddings=512,
        layer_norm_eps=1e-7,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=CLASSES,
    )
    model = DebertaV2ForSequenceClassification(config).to(DEVICE).train()
    return to_float8(model, skip=SKIP)


def example_batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(5, VOCABULARY, (BATCH, LENGTH), device=DEVICE)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "labels": torch.randint(0, CLASSES, (BATCH,), device=DEVICE),
    }
