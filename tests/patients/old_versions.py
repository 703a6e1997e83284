"""FP8 from the environment with accelerate 1.8.1, which refuses it, beside an old Transformer Engine.

The folder old_wheels stands in for the versions: it holds their metadata, and none of their code is run.
"""

import os
import sys
from pathlib import Path

os.environ["ACCELERATE_MIXED_PRECISION"] = "fp8"
sys.path.insert(0, str(Path(__file__).with_name("old_wheels")))

import torch
import transformer_engine as transformer_engine
from transformers import LlamaConfig, LlamaForCausalLM

MUST = ("ENV005",)
MUST_NOT = (
    "fp8-request-overridden",
    "fp8-setting-without-effect",
    "fp8-backend-misspelled",
    "fp8-backend-missing",
    "ENV006",
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
