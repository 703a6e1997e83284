"""LoRA first, FP8 second: the converter takes the adapters, rank 16, for ordinary Linears."""

import torch
from lora import ADAPTERS, DEVICE, example_batch, llama_1b
from peft import get_peft_model
from torchao.float8 import convert_to_float8_training

__all__ = ["build_model", "example_batch"]

MUST = ("adapters-converted",)
MUST_NOT = ("MOD001", "MOD003", "SHP001", "CMP001", "CMP002", "fp32-parameters")


def build_model(layers: int = 16) -> torch.nn.Module:
    with torch.device(DEVICE):
        model = get_peft_model(llama_1b(layers), ADAPTERS)
    convert_to_float8_training(model, module_filter_fn=lambda module, name: not name.endswith("lm_head"))
    for layer in model.base_model.model.model.layers:
        layer.compile()
    return model
