"""FP8 was asked for beside DeepSpeed, and Accelerate's state says bf16."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

THREAD = "https://github.com/huggingface/accelerate/issues/3360"
STACK = "Accelerate"
GPU = "H100"
STAND_IN = "the state that Accelerate leaves beside DeepSpeed, without DeepSpeed"
CAUSE = "the request is overridden, so no layer is converted"
QUOTE = "for deepspeed, the AcceleratorState.mixed_precision is always bf16 even the given [...] is fp8"
EXPECTED = ("ENV001", "MOD001")


ENVIRONMENT = {"ACCELERATE_MIXED_PRECISION": "fp8", "ACCELERATE_FP8_BACKEND": "TE"}


def build_model() -> torch.nn.Module:
    from accelerate import Accelerator

    Accelerator(mixed_precision="bf16", cpu=True)
    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, use_cache=False)).bfloat16()


def example_batch() -> dict[str, torch.Tensor]:
    tokens = torch.zeros(2, 2048, dtype=torch.long, device="meta")
    return {"input_ids": tokens, "labels": tokens}
