"""T5-base: its encoder and decoder converted by torchao and run eagerly; 16 pairs of 512 and 128 tokens."""

import torch
from torchao.float8 import convert_to_float8_training
from transformers import T5Config, T5ForConditionalGeneration

MUST = ("CMP001",)
MUST_NOT = ("MOD001", "MOD003", "SHP001", "CMP002")

DEVICE = "cuda" if torch.cuda.is_available() else "meta"


def build_model(layers: int = 12) -> torch.nn.Module:
    config = T5Config(
        d_model=768, d_ff=3072, num_layers=layers, num_heads=12, decoder_start_token_id=0, use_cache=False
    )
    with torch.device(DEVICE):
        model = T5ForConditionalGeneration(config).bfloat16()
    return convert_to_float8_training(model, module_filter_fn=lambda module, name: name != "lm_head")


def example_batch() -> dict[str, torch.Tensor]:
    tokens, labels = (torch.randint(1, 32000, (16, length), device=DEVICE) for length in (512, 128))
    return {"input_ids": tokens, "labels": labels}
