"""ACCELERATE_FP8_BACKEND=AO is left from an FP8 run, and this is the BF16 run: `prepare` would raise
AttributeError.

The file stops before the call that raises.
"""

import os

os.environ["ACCELERATE_FP8_BACKEND"] = "AO"

import torch
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM

MUST = ("backend-by-accident",)
MUST_NOT = (
    "fp8-request-overridden",
    "fp8-setting-without-effect",
    "fp8-backend-misspelled",
    "fp8-backend-missing",
    "incompatible-versions",
    "MOD001",
    "hidden-fp8",
    "CMP001",
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def build_model(layers: int = 2) -> torch.nn.Module:
    Accelerator(mixed_precision="bf16")
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=layers,
        num_attention_heads=4,
        vocab_size=8192,
        use_cache=False,
    )
    return LlamaForCausalLM(config).to(DEVICE, torch.bfloat16)


def example_batch() -> dict[str, torch.Tensor]:
    tokens = torch.randint(0, 8192, (2, 128), device=DEVICE)
    return {"input_ids": tokens, "labels": tokens}
