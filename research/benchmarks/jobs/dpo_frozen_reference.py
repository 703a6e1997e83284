"""DPO of a Llama 4096 wide in FP8, eager, beside its frozen reference in BF16: `training_step` runs both."""

from __future__ import annotations

import copy

import torch
from plain import DEVICE, built, changes, size, to_float8
from torch import nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

LAYERS, WIDTH, INNER, HEADS, GROUPS = size((4, 4096, 11008, 32, 8), (2, 64, 128, 4, 2))
VOCABULARY, PAIRS, LENGTH = size((32000, 4, 1024), (256, 2, 32))
BETA = 0.1
VARIANTS = changes("model.layers")
reference: nn.Module


def build_model() -> nn.Module:
    global reference
    config = LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        vocab_size=VOCABULARY,
        use_cache=False,
    )
    with built():
        model = LlamaForCausalLM(config).train()
    reference = copy.deepcopy(model).eval().requires_grad_(False)
    return to_float8(model)


def example_batch() -> dict[str, torch.Tensor]:
    return {"ids": torch.randint(0, VOCABULARY, (2 * PAIRS, LENGTH), device=DEVICE)}


def log_probabilities(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=ids).logits[:, :-1].float()
    return (
        -functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        .view(len(ids), -1)
        .sum(-1)
    )


def training_step(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        before = log_probabilities(reference, batch["ids"])
    chosen, rejected = (log_probabilities(model, batch["ids"]) - before).chunk(2)
    return -functional.logsigmoid(BETA * (chosen - rejected)).mean()
