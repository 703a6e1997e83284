"""Llama 3.1 8B at full size, converted by torchao with the head left out, every layer compiled: as the
torchao docs do it."""

import torch
from torchao.float8 import convert_to_float8_training
from transformers import LlamaConfig, LlamaForCausalLM

MUST: tuple[str, ...] = ()
MUST_NOT = ("CMP001", "CMP002", "MOD001", "MOD003", "SHP001")
SILENT = True

DEVICE = "cuda" if torch.cuda.is_available() else "meta"


def build_model(layers: int = 32) -> torch.nn.Module:
    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        use_cache=False,
        dtype=torch.bfloat16,
    )
    with torch.device(DEVICE):
        model = LlamaForCausalLM(config).bfloat16()
    convert_to_float8_training(model, module_filter_fn=lambda module, name: name != "lm_head")
    for layer in model.model.layers:
        layer.compile()
    return model


def example_batch() -> dict[str, torch.Tensor]:
    tokens = torch.randint(0, 128256, (1, 8192), device=DEVICE)
    return {"input_ids": tokens, "labels": tokens}
