"""T5 v1.1 large: encoder and decoder in FP8, eager."""

from __future__ import annotations

import torch
from plain import DEVICE, built, changes, size, to_float8
from torch import nn
from transformers import T5Config, T5ForConditionalGeneration

LAYERS, WIDTH, INNER, HEADS, HEAD = size((24, 1024, 2816, 16, 64), (2, 64, 128, 4, 16))
VOCABULARY, BATCH, LENGTH, ANSWER = size((32128, 16, 512, 128), (256, 2, 32, 16))
VARIANTS = changes("encoder.block", "decoder.block")


def build_model() -> nn.Module:
    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        d_kv=HEAD,
        d_ff=INNER,
        num_layers=LAYERS,
        num_heads=HEADS,
        feed_forward_proj="gated-gelu",
        dropout_rate=0.0,
        tie_word_embeddings=False,
        decoder_start_token_id=0,
        use_cache=False,
    )
    with built():
        model = T5ForConditionalGeneration(config)
    return to_float8(model.train())


def example_batch() -> dict[str, torch.Tensor]:
    return {
        "input_ids": torch.randint(2, VOCABULARY, (BATCH, LENGTH), device=DEVICE),
        "labels": torch.randint(2, VOCABULARY, (BATCH, ANSWER), device=DEVICE),
    }
