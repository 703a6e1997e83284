"""A student in FP8, compiled by block, learns from a wider frozen teacher in BF16; one module holds both."""

from __future__ import annotations

import torch
from plain import DEVICE, built, changes, size, to_float8
from torch import nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

STUDENT, TEACHER = size(((8, 2048, 5632, 16), (4, 4096, 11008, 32)), ((2, 64, 128, 4), (2, 128, 256, 4)))
VOCABULARY, BATCH, LENGTH = size((32000, 4, 2048), (256, 2, 32))
VARIANTS = changes("*", skip=("lm_head", "teacher"))


def llama(layers: int, width: int, inner: int, heads: int) -> nn.Module:
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=width,
            intermediate_size=inner,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            vocab_size=VOCABULARY,
            use_cache=False,
        )
    )


class Distillation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = llama(*STUDENT), llama(*TEACHER)
        self.teacher.requires_grad_(False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            wanted = functional.log_softmax(self.teacher(input_ids=ids).logits, -1)
        logits = functional.log_softmax(self.student(input_ids=ids).logits, -1)
        return functional.kl_div(
            logits.flatten(0, 1), wanted.flatten(0, 1), log_target=True, reduction="batchmean"
        )


def build_model() -> nn.Module:
    with built():
        model = Distillation()
    to_float8(model.student)
    for block in model.student.model.layers:
        block.compile()
    return model


def example_batch() -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (BATCH, LENGTH), device=DEVICE)


def loss(output: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return output
