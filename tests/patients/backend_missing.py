"""FP8 with Transformer Engine was asked for, and the installed one cannot be imported.

The folder broken_te stands in for a half-installed package, so that the patient is sick where a healthy one
is installed.
"""

import os
import sys
from pathlib import Path

os.environ["ACCELERATE_MIXED_PRECISION"] = "fp8"
os.environ["ACCELERATE_FP8_BACKEND"] = "TE"
sys.path.insert(0, str(Path(__file__).with_name("broken_te")))

import torch
from transformers import LlamaConfig, LlamaForCausalLM

MUST = ("fp8-backend-missing",)
MUST_NOT = (
    "fp8-request-overridden",
    "fp8-setting-without-effect",
    "fp8-backend-misspelled",
    "incompatible-versions",
    "ENV006",
    "backend-by-accident",
    "CMP001",
    "fp8-storage-only",
    "SHP001",
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def build_model(layers: int = 2) -> torch.nn.Module:
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
