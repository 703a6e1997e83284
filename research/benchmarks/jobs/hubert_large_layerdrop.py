"""HuBERT large with CTC on 10 s of audio, its LayerDrop on: FP8, eager."""

from __future__ import annotations

import torch
from plain import DEVICE, built, by_block, changes, size, to_float8
from torch import nn
from transformers import HubertConfig, HubertForCTC

LAYERS, WIDTH, INNER, HEADS = size((24, 1024, 4096, 16), (3, 64, 128, 4))
VOCABULARY, BATCH, SAMPLES, LETTERS, CHANNELS = size((32, 16, 160_000, 100, 512), (32, 2, 8_000, 4, 32))
BLOCKS = ("hubert.encoder.layers",)


def with_projection(model: nn.Module) -> nn.Module:
    """Compile the FP8 layer before the blocks too, as the printed lines do."""
    model = by_block(model, BLOCKS)
    model.hubert.feature_projection.projection.compile()
    return model


VARIANTS = changes(*BLOCKS) | {
    "compile-blocks": with_projection,
}


def build_model() -> nn.Module:
    config = HubertConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=INNER,
        conv_dim=(CHANNELS,) * 7,
        conv_bias=True,
        feat_extract_norm="layer",
        do_stable_layer_norm=True,
        layerdrop=0.1,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        activation_dropout=0.0,
        feat_proj_dropout=0.0,
        final_dropout=0.0,
        apply_spec_augment=False,
        ctc_zero_infinity=True,
    )
    with built():
        model = HubertForCTC(config)
    return to_float8(model.train())


def example_batch() -> dict[str, torch.Tensor]:
    return {
        "input_values": torch.randn(BATCH, SAMPLES, device=DEVICE, dtype=torch.bfloat16),
        "labels": torch.randint(1, VOCABULARY, (BATCH, LETTERS), device=DEVICE),
    }
