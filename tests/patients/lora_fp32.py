"""LoRA as PEFT makes it, fp32 adapters, on a BF16 base in compiled FP8, and no autocast: all adapters
multiply in fp32.

On the meta device PEFT would leave any adapter in fp32, so the model is real, and small.
"""

import torch
from peft import LoraConfig, get_peft_model
from torchao.float8 import convert_to_float8_training
from transformers import LlamaConfig, LlamaForCausalLM

MUST = ("STP004",)
MUST_NOT = ("adapters-converted", "MOD001", "MOD003", "SHP001", "CMP001", "CMP002")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def build_model(layers: int = 2) -> torch.nn.Module:
    config = LlamaConfig(
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=8192,
        use_cache=False,
    )
    with torch.device(DEVICE):
        base = LlamaForCausalLM(config).bfloat16()
        convert_to_float8_training(base, module_filter_fn=lambda module, name: name != "lm_head")
        model = get_peft_model(base, LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))
    for layer in model.base_model.model.model.layers:
        layer.compile()
    return model


def example_batch() -> dict[str, torch.Tensor]:
    tokens = torch.randint(0, 8192, (4, 2048), device=DEVICE)
    return {"input_ids": tokens, "labels": tokens}
