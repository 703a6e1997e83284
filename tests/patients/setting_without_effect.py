"""FP8_BACKEND=TE in the environment, as some training frameworks export it: nothing reads that name, and
torchao is taken."""

import os

os.environ["ACCELERATE_MIXED_PRECISION"] = "fp8"
os.environ["FP8_BACKEND"] = "TE"

import torch
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM

MUST = ("fp8-setting-without-effect", "CMP001")
MUST_NOT = (
    "MOD001",
    "fp8-storage-only",
    "fp8-request-overridden",
    "fp8-backend-misspelled",
    "SHP001",
    "CMP002",
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def build_model(layers: int = 2) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=layers,
        num_attention_heads=4,
        vocab_size=8192,
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model, optimizer = Accelerator().prepare(model, optimizer)
    return model, optimizer


def example_batch() -> dict[str, torch.Tensor]:
    tokens = torch.randint(0, 8192, (2, 128), device=DEVICE)
    return {"input_ids": tokens, "labels": tokens}
