"""StarCoder2 3B's width, cut at 8 layers: biases and LayerNorms, two groups of keys, 4,096 tokens. Tensorwise
FP8 but for the head, transformers' gradient checkpointing, eager."""

from __future__ import annotations

from plain import built, changes, size, to_float8, tokens
from torch import Tensor, nn
from transformers import Starcoder2Config, Starcoder2ForCausalLM

RECIPE = "tensorwise"
WHOLE = False
LAYERS, WIDTH, INNER, HEADS, GROUPS = size((8, 3072, 12288, 24, 2), (2, 64, 128, 4, 2))
VOCABULARY, BATCH, LENGTH = size((49152, 2, 4096), (256, 2, 32))
VARIANTS = changes("model.layers")


def build_model() -> nn.Module:
    config = Starcoder2Config(
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        vocab_size=VOCABULARY,
        residual_dropout=0.0,
        embedding_dropout=0.0,
    )
    with built():
        model = Starcoder2ForCausalLM(config).train()
    model.gradient_checkpointing_enable()
    return to_float8(model, "tensorwise")


def example_batch() -> dict[str, Tensor]:
    return tokens(VOCABULARY, BATCH, LENGTH)
