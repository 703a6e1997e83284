"""NLLB 3.3B's width, cut at six layers a side: PEFT's LoRA on all Linears, adapters in fp32 as PEFT makes
them. BF16, eager: what would FP8 give?"""

from __future__ import annotations

import torch
from peft import LoraConfig, get_peft_model
from plain import DEVICE, built, changes, size
from torch import nn
from transformers import M2M100Config, M2M100ForConditionalGeneration

RECIPE = None
WHOLE = False
LAYERS, WIDTH, INNER, HEADS = size((6, 2048, 8192, 16), (2, 64, 128, 4))
VOCABULARY, BATCH, SOURCE, TARGET = size((128112, 32, 256, 192), (256, 2, 32, 16))
LISTS = ("base_model.model.model.encoder.layers", "base_model.model.model.decoder.layers")
VARIANTS = changes(*LISTS, skip=("lm_head", "lora_"))

autocast = torch.bfloat16


def build_model() -> nn.Module:
    config = M2M100Config(
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        encoder_layers=LAYERS,
        decoder_layers=LAYERS,
        encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS,
        encoder_ffn_dim=INNER,
        decoder_ffn_dim=INNER,
        encoder_layerdrop=0.0,
        decoder_layerdrop=0.0,
        use_cache=False,
    )
    with built():
        base = M2M100ForConditionalGeneration(config).train()
        return get_peft_model(base, LoraConfig(r=16, target_modules="all-linear", task_type="SEQ_2_SEQ_LM"))


def example_batch() -> dict[str, torch.Tensor]:
    def ids(length: int) -> torch.Tensor:
        return torch.randint(3, VOCABULARY, (BATCH, length), device=DEVICE)

    source = ids(SOURCE)
    return {"input_ids": source, "attention_mask": torch.ones_like(source), "labels": ids(TARGET)}
