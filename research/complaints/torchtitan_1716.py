"""Qwen3-MoE with FP8 Linears: the experts have no FP8 grouped GEMM."""

from __future__ import annotations

import torch
from torchao.float8 import convert_to_float8_training
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

THREAD = "https://github.com/pytorch/torchtitan/issues/1716"
STACK = "torchao"
GPU = "H100"
STAND_IN = "Hugging Face's Qwen3-MoE for torchtitan's"
CAUSE = "the experts stay in BF16"
QUOTE = "the available Grouped GEMM kernels only support float16"
EXPECTED = ("MOD004",)


def build_model() -> torch.nn.Module:
    config = Qwen3MoeConfig(num_hidden_layers=2, use_cache=False)
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(config).bfloat16()
    left_out = ("gate", "lm_head")  # filter_fqns of torchtitan's presets: router.gate and output
    convert_to_float8_training(
        model, module_filter_fn=lambda module, name: name.split(".")[-1] not in left_out
    )
    for layer in model.model.layers:
        layer.compile()
    return model


def example_batch() -> dict[str, torch.Tensor]:
    tokens = torch.zeros(2, 4096, dtype=torch.long, device="meta")
    return {"input_ids": tokens, "labels": tokens}
