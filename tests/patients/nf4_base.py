"""A base in NF4 for its memory, and everything converted to FP8 for its speed: the converter takes the packed
weights too."""

import torch
from torch import nn
from torchao.float8 import convert_to_float8_training
from torchao.quantization import to_nf4
from transformers import LlamaConfig, LlamaForCausalLM

MUST = ("quantized-base",)
MUST_NOT = (
    "MOD001",
    "fp8-storage-only",
    "MOD004",
    "tied-weights-untied",
    "hooks-or-subclass-lost",
    "CMP001",
    "SHP001",
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def build_model(layers: int = 2) -> nn.Module:
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=layers,
        num_attention_heads=4,
        vocab_size=1024,
        use_cache=False,
    )
    model = LlamaForCausalLM(config).bfloat16().to(DEVICE)
    for module in model.model.layers.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(to_nf4(module.weight.data), requires_grad=False)
    convert_to_float8_training(model, module_filter_fn=lambda module, name: name != "lm_head")
    for layer in model.model.layers:
        layer.compile()
    return model


def example_batch() -> dict[str, torch.Tensor]:
    tokens = torch.randint(0, 1024, (2, 128), device=DEVICE)
    return {"input_ids": tokens, "labels": tokens}
