"""A Llama of Transformer Engine's own layers: RMSNorm, SwiGLU, rotary embeddings, grouped queries and its
cross entropy, with current scaling."""

from __future__ import annotations

import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import Float8CurrentScaling

MUST: tuple[str, ...] = ()
MUST_NOT = ("MOD001", "CMP001", "CMP002", "SHP001")

WIDTH, VOCABULARY = 2048, 32000


class Model(torch.nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, WIDTH, dtype=torch.bfloat16)
        self.rotary = te.RotaryPositionEmbedding(WIDTH // 16)
        self.layers = torch.nn.ModuleList(
            te.TransformerLayer(
                WIDTH,
                4 * WIDTH,
                16,
                num_gqa_groups=4,
                layer_number=i + 1,
                params_dtype=torch.bfloat16,
                normalization="RMSNorm",
                activation="swiglu",
                bias=False,
                hidden_dropout=0.0,
                attention_dropout=0.0,
                attn_input_format="bshd",
                self_attn_mask_type="causal",
            )
            for i in range(layers)
        )
        self.head = te.LayerNormLinear(
            WIDTH, VOCABULARY, bias=False, normalization="RMSNorm", params_dtype=torch.bfloat16
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x, angles = self.embedding(tokens), self.rotary(tokens.shape[1])
        with te.autocast(enabled=True, recipe=Float8CurrentScaling()):
            for layer in self.layers:
                x = layer(x, rotary_pos_emb=angles)
            return self.head(x)


def example_batch() -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (8, 2048), device="cuda")


def loss(output: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return te.parallel_cross_entropy(output, batch).mean()


def build_model(layers: int = 8) -> torch.nn.Module:
    model = Model(layers).cuda()
    batch = example_batch()
    loss(model(batch), batch).backward()
    return model
