"""BERT-large through ``Accelerator(mixed_precision="fp8")`` with torchao: fp32 parameters under its autocast,
eager."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from accelerate.utils import AORecipeKwargs
from plain import DEVICE, by_block, changes, in_bf16, size
from torch import nn
from transformers import BertConfig, BertForMaskedLM

LAYERS, WIDTH, INNER, HEADS = size((24, 1024, 4096, 16), (2, 64, 128, 4))
VOCABULARY, BATCH, LENGTH = size((30522, 16, 512), (250, 2, 32))
BLOCKS = ("bert.encoder.layer",)


def with_transform(model: nn.Module) -> nn.Module:
    """Compile the FP8 layer beside the blocks too, as the printed lines do."""
    model = by_block(model, BLOCKS)
    model.cls.predictions.transform.dense.compile()
    return model


VARIANTS = changes(*BLOCKS) | {
    "bf16_compiled": lambda model: by_block(in_bf16(model), BLOCKS),
    "compile-blocks": with_transform,
}


def build_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=INNER,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = BertForMaskedLM(config).to(DEVICE).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    accelerator = Accelerator(mixed_precision="fp8", kwargs_handlers=[AORecipeKwargs()])
    model, optimizer = accelerator.prepare(model, optimizer)
    return model, optimizer


def example_batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(0, VOCABULARY, (BATCH, LENGTH), device=DEVICE)
    return {"input_ids": ids, "labels": ids}
