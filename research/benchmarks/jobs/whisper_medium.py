"""Whisper medium: fp32 parameters under BF16 autocast, encoder and decoder in FP8, eager."""

from __future__ import annotations

import torch
from plain import DEVICE, built, changes, size, to_float8
from torch import nn
from transformers import WhisperConfig, WhisperForConditionalGeneration

LAYERS, WIDTH, INNER, HEADS = size((24, 1024, 4096, 16), (2, 64, 128, 4))
VOCABULARY, BATCH, FRAMES, LENGTH = size((51865, 8, 3000, 128), (256, 2, 64, 16))
BINS = size(80, 16)
VARIANTS = changes("model.encoder.layers", "model.decoder.layers", skip=("proj_out",))

autocast = torch.bfloat16


def build_model() -> nn.Module:
    config = WhisperConfig(
        vocab_size=VOCABULARY,
        num_mel_bins=BINS,
        d_model=WIDTH,
        encoder_layers=LAYERS,
        decoder_layers=LAYERS,
        encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS,
        encoder_ffn_dim=INNER,
        decoder_ffn_dim=INNER,
        max_source_positions=FRAMES // 2,
        max_target_positions=max(LENGTH, 448) if FRAMES > 64 else LENGTH,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        use_cache=False,
    )
    with built(torch.float32):
        model = WhisperForConditionalGeneration(config)
    return to_float8(model.train(), skip=("proj_out",))


def example_batch() -> dict[str, torch.Tensor]:
    return {
        "input_features": torch.randn(BATCH, BINS, FRAMES, device=DEVICE),
        "labels": torch.randint(3, VOCABULARY, (BATCH, LENGTH), device=DEVICE),
    }
