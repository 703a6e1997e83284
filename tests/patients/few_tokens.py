"""A 1B-shaped Llama, compiled, whose micro-batch is one sequence of 256 tokens; it accumulates 32 of them."""

import llama_gqa
import torch

MUST = ("SHP003",)
MUST_NOT = ("MOD001", "MOD003", "MOD004", "SHP001", "SHP002", "CMP001", "CMP002")

accumulate = 32


def build_model(layers: int = 8) -> torch.nn.Module:
    model = llama_gqa.build_model(layers)
    for layer in model.model.layers:
        layer.compile()
    return model


def example_batch() -> dict[str, torch.Tensor]:
    tokens = torch.randint(0, 128256, (1, 256), device=llama_gqa.DEVICE)
    return {"input_ids": tokens, "labels": tokens}
