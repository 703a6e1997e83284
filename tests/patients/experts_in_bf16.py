"""Two layers of a Mixtral: attention in FP8 and compiled, and the experts, where the work is, in BF16.

They are one 3-D weight each, so no converter of nn.Linear sees them, and none says so.
"""

import torch
from torchao.float8 import convert_to_float8_training
from transformers import MixtralConfig, MixtralForCausalLM

MUST = ("MOD004",)
MUST_NOT = ("MOD001", "MOD003", "tied-weights-untied", "hooks-or-subclass-lost", "CMP001", "CMP002", "SHP001")

DEVICE = "cuda" if torch.cuda.is_available() else "meta"


def build_model(layers: int = 2) -> torch.nn.Module:
    with torch.device(DEVICE):
        model = MixtralForCausalLM(MixtralConfig(num_hidden_layers=layers, use_cache=False)).bfloat16()
    convert_to_float8_training(model, module_filter_fn=lambda module, name: name != "lm_head")
    for layer in model.model.layers:
        layer.compile()
    return model


def example_batch() -> dict[str, torch.Tensor]:
    tokens = torch.randint(0, 32000, (2, 2048), device=DEVICE)
    return {"input_ids": tokens, "labels": tokens}
