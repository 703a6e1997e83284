"""ModernBERT large with a masked-language head: rowwise FP8, eager."""

from __future__ import annotations

import torch
from plain import built, changes, size, to_float8, tokens
from torch import nn
from transformers import ModernBertConfig, ModernBertForMaskedLM

LAYERS, WIDTH, INNER, HEADS = size((28, 1024, 2624, 16), (2, 64, 128, 4))
VOCABULARY, BATCH, LENGTH = size((50368, 16, 1024), (256, 2, 32))
SKIP = ("decoder",)
VARIANTS = changes("model.layers", skip=SKIP)


def build_model() -> nn.Module:
    config = ModernBertConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        cls_token_id=1,
        sep_token_id=2,
    )
    config._attn_implementation = "sdpa"
    with built():
        model = ModernBertForMaskedLM(config)
    return to_float8(model.train(), "rowwise", skip=SKIP)


def example_batch() -> dict[str, torch.Tensor]:
    return tokens(VOCABULARY, BATCH, LENGTH)
