"""A Llama whose Linears are Hugging Face's FP8Linear, as `from_pretrained` of an FP8 checkpoint leaves it,
with LoRA on top.

Its owner believes that this is FP8 training. The weights are stored in FP8; the backward pass dequantises
them.
"""

import torch
from peft import LoraConfig, get_peft_model
from transformers import FineGrainedFP8Config, LlamaConfig, LlamaForCausalLM
from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear

MUST = ("MOD003",)
MUST_NOT = ("MOD001", "SHP001", "CMP001", "CMP002")

DEVICE = "cuda" if torch.cuda.is_available() else "meta"


def build_model(layers: int = 4) -> torch.nn.Module:
    config = LlamaConfig(
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=32000,
        use_cache=False,
    )
    with torch.device("meta"):
        base = LlamaForCausalLM(config).bfloat16()
        base = replace_with_fp8_linear(
            base, modules_to_not_convert=["lm_head"], quantization_config=FineGrainedFP8Config()
        )
    if DEVICE == "cuda":
        base.to_empty(device=DEVICE)
    with torch.device(DEVICE):
        return get_peft_model(
            base, LoraConfig(r=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        )


def example_batch() -> dict[str, torch.Tensor]:
    tokens = torch.randint(0, 32000, (4, 1024), device=DEVICE)
    return {"input_ids": tokens, "labels": tokens}
