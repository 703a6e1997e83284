"""A Llama 7B whose Linears are Transformer Engine's, as Accelerate's `convert_model` makes them, in FP8: what
does it gain at full depth?"""

from __future__ import annotations

import torch
import transformer_engine.pytorch as te
from accelerate.utils.transformer_engine import convert_model
from transformer_engine.common.recipe import DelayedScaling
from transformers import LlamaConfig, LlamaForCausalLM

MUST = ("MEM001",)
MUST_NOT = ("MOD001", "MOD002", "CMP001", "CMP002", "CKP002", "SHP001")


class Llama(LlamaForCausalLM):
    def forward(self, *arguments: object, **settings: object) -> object:
        with te.autocast(enabled=True, recipe=DelayedScaling()):
            return super().forward(*arguments, **settings)


def build_model(layers: int = 32) -> torch.nn.Module:
    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=layers,
        num_attention_heads=32,
        vocab_size=32000,
        use_cache=False,
    )
    with torch.device("cuda"):
        model = Llama(config).bfloat16()
    with torch.no_grad():
        convert_model(model)
    model(**example_batch()).loss.backward()
    model.zero_grad()
    return model


def example_batch() -> dict[str, torch.Tensor]:
    tokens = torch.randint(0, 32000, (2, 2048), device="cuda")
    return {"input_ids": tokens, "labels": tokens}
