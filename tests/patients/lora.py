"""LoRA of rank 16 on a base that torchao converted first, as it should be; but nothing is compiled."""

import torch
from peft import LoraConfig, get_peft_model
from torchao.float8 import convert_to_float8_training
from transformers import LlamaConfig, LlamaForCausalLM

MUST = ("CMP001",)
MUST_NOT = ("MOD001", "MOD003", "SHP001", "CMP002")

DEVICE = "cuda" if torch.cuda.is_available() else "meta"
ADAPTERS = LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")


def llama_1b(layers: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        tie_word_embeddings=True,
        use_cache=False,
    )
    return LlamaForCausalLM(config).bfloat16()


def build_model(layers: int = 16) -> torch.nn.Module:
    with torch.device(DEVICE):
        base = llama_1b(layers)
        convert_to_float8_training(base, module_filter_fn=lambda module, name: name != "lm_head")
        return get_peft_model(base, ADAPTERS)


def example_batch() -> dict[str, torch.Tensor]:
    tokens = torch.randint(0, 128256, (4, 2048), device=DEVICE)
    return {"input_ids": tokens, "labels": tokens}
