"""XLM-RoBERTa large as an embedding model: mean pooling, a contrastive loss in the batch, FP8, eager."""

from __future__ import annotations

import torch
from plain import DEVICE, built, changes, size, to_float8
from torch import nn
from torch.nn import functional
from transformers import XLMRobertaConfig, XLMRobertaModel

LAYERS, WIDTH, INNER, HEADS = size((24, 1024, 4096, 16), (2, 64, 128, 4))
VOCABULARY, PAIRS, LENGTH = size((250002, 64, 128), (250, 4, 32))
TEMPERATURE = 0.05
VARIANTS = changes("encoder.encoder.layer", skip=())


class Embedder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        config = XLMRobertaConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            intermediate_size=INNER,
            max_position_embeddings=LENGTH + 2,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        self.encoder = XLMRobertaModel(config, add_pooling_layer=False)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        hidden = self.encoder(input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask[..., None].to(hidden.dtype)
        return functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


def build_model() -> nn.Module:
    with built():
        model = Embedder()
    return to_float8(model.train(), skip=())


def example_batch() -> dict[str, torch.Tensor]:
    """Make queries, and a passage for each; half of them are shorter than the others."""
    mask = torch.ones(2 * PAIRS, LENGTH, dtype=torch.long, device=DEVICE)
    mask[::2, LENGTH // 2 :] = 0
    ids = torch.randint(5, VOCABULARY, (2 * PAIRS, LENGTH), device=DEVICE)
    return {"input_ids": torch.where(mask == 1, ids, 1), "attention_mask": mask}


def loss(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    queries, passages = output.float().chunk(2)
    return functional.cross_entropy(
        queries @ passages.T / TEMPERATURE, torch.arange(PAIRS, device=output.device)
    )
