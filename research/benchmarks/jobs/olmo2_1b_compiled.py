"""OLMo 2 1B, every Linear but the head in FP8, every block compiled."""

from __future__ import annotations

import torch
from plain import built, changes, size, to_float8, tokens
from torch import nn
from transformers import Olmo2Config, Olmo2ForCausalLM

LAYERS, WIDTH, INNER, HEADS = size((16, 2048, 8192, 16), (2, 64, 128, 4))
VOCABULARY, BATCH, LENGTH = size((100352, 2, 4096), (256, 2, 32))
VARIANTS = changes("model.layers")


def build_model() -> nn.Module:
    config = Olmo2Config(
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        vocab_size=VOCABULARY,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        use_cache=False,
    )
    with built():
        model = to_float8(Olmo2ForCausalLM(config).train())
    for block in model.model.layers:
        block.compile()
    return model


def example_batch() -> dict[str, torch.Tensor]:
    return tokens(VOCABULARY, BATCH, LENGTH)
