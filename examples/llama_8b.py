"""A Llama 3 8B whose Linears torchao converts to FP8, and nobody compiles: a model file for fp8doctor.

fp8doctor llama_8b.py                      # times the step on this GPU: 77 GiB
fp8doctor llama_8b.py --assume-gpu h200    # without a GPU: estimates, and loads no weights
"""

import torch
from torchao.float8 import convert_to_float8_training
from transformers import LlamaConfig, LlamaForCausalLM

DEVICE = "cuda" if torch.cuda.is_available() else "meta"


def build_model(layers=32):
    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        dtype=torch.bfloat16,
        use_cache=False,
    )
    with torch.device(DEVICE):
        model = LlamaForCausalLM._from_config(config).train()
    return convert_to_float8_training(model, module_filter_fn=lambda layer, name: name != "lm_head")


def example_batch():
    tokens = torch.randint(0, 128256, (2, 2048), device=DEVICE)
    return {"input_ids": tokens, "labels": tokens}
