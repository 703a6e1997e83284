"""FLUX as torchtitan writes it: two streams, then one, modulated by a vector a sample."""

from __future__ import annotations

import torch
from torch import Tensor, nn

WIDTH, HEADS = 3072, 24
IMAGE, TEXT = 256, 256
"""Tokens of a 256 x 256 image, and of its caption."""
SAMPLES = 64
"""32,768 tokens of both."""


def attend(qkv: Tensor) -> Tensor:
    queries, keys, values = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in qkv.chunk(3, dim=-1))
    seen = nn.functional.scaled_dot_product_attention(queries, keys, values)
    return seen.transpose(1, 2).flatten(2)


class Modulation(nn.Module):
    """So many vectors of one."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count, self.lin = count, nn.Linear(WIDTH, count * WIDTH)

    def forward(self, vec: Tensor) -> tuple[Tensor, ...]:
        return self.lin(nn.functional.silu(vec))[:, None, :].chunk(self.count, dim=-1)


class Stream(nn.Module):
    """What a block with two streams holds of one."""

    def __init__(self) -> None:
        super().__init__()
        self.mod, self.norm = Modulation(6), nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(approximate="tanh"), nn.Linear(4 * WIDTH, WIDTH)
        )


class DoubleBlock(nn.Module):
    """Image and text, each with weights of its own, that attend to each other."""

    def __init__(self) -> None:
        super().__init__()
        self.img, self.txt = Stream(), Stream()

    def forward(self, img: Tensor, txt: Tensor, vec: Tensor) -> tuple[Tensor, Tensor]:
        mods = self.txt.mod(vec), self.img.mod(vec)
        both = [
            stream.qkv(stream.norm(x) * (1 + mod[1]) + mod[0])
            for stream, x, mod in zip((self.txt, self.img), (txt, img), mods, strict=True)
        ]
        seen = attend(torch.cat(both, dim=1)).split([txt.shape[1], img.shape[1]], dim=1)
        done = []
        for stream, x, mod, y in zip((self.txt, self.img), (txt, img), mods, seen, strict=True):
            x = x + mod[2] * stream.proj(y)
            done.append(x + mod[5] * stream.mlp(stream.norm(x) * (1 + mod[4]) + mod[3]))
        return done[1], done[0]


class SingleBlock(nn.Module):
    """One stream, attention and MLP side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.linear1, self.linear2 = nn.Linear(WIDTH, 7 * WIDTH), nn.Linear(5 * WIDTH, WIDTH)
        self.modulation, self.norm = Modulation(3), nn.LayerNorm(WIDTH, elementwise_affine=False)

    def forward(self, x: Tensor, vec: Tensor) -> Tensor:
        shift, scale, gate = self.modulation(vec)
        qkv, hidden = self.linear1(self.norm(x) * (1 + scale) + shift).split([3 * WIDTH, 4 * WIDTH], dim=-1)
        return x + gate * self.linear2(torch.cat((attend(qkv), nn.functional.gelu(hidden)), dim=-1))


class Flux(nn.Module):
    """19 blocks with two streams, 38 with one."""

    def __init__(self) -> None:
        super().__init__()
        self.img_in, self.txt_in = nn.Linear(64, WIDTH), nn.Linear(4096, WIDTH)
        self.time_in = nn.Sequential(nn.Linear(256, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.vector_in = nn.Sequential(nn.Linear(768, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.double_blocks = nn.ModuleList(DoubleBlock() for _ in range(19))
        self.single_blocks = nn.ModuleList(SingleBlock() for _ in range(38))
        self.final_layer = nn.Linear(WIDTH, 64)
        self.adaln = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, img: Tensor, txt: Tensor, timesteps: Tensor, y: Tensor) -> Tensor:
        vec = self.time_in(timesteps) + self.vector_in(y)
        img, txt = self.img_in(img), self.txt_in(txt)
        for block in self.double_blocks:
            img, txt = block(img, txt, vec)
        x = torch.cat((txt, img), dim=1)
        for block in self.single_blocks:
            x = block(x, vec)
        shift, scale = self.adaln(nn.functional.silu(vec))[:, None, :].chunk(2, dim=-1)
        return self.final_layer(x[:, txt.shape[1] :] * (1 + scale) + shift)


def batch() -> dict[str, Tensor]:
    """Latents in patches, a caption, a timestep and a pooled vector a sample."""
    sizes = {
        "img": (SAMPLES, IMAGE, 64),
        "txt": (SAMPLES, TEXT, 4096),
        "timesteps": (SAMPLES, 256),
        "y": (SAMPLES, 768),
    }
    return {name: torch.empty(size, dtype=torch.bfloat16, device="meta") for name, size in sizes.items()}
