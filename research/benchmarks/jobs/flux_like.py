"""A diffusion transformer in the manner of Flux: double-stream and single-stream blocks, each compiled.

The layers of the modulation see one row a sample; they stay in BF16 on purpose.
"""

from __future__ import annotations

import torch
from plain import DEVICE, built, changes, size, to_float8
from torch import nn
from torch.nn import functional

DOUBLE, SINGLE, WIDTH, HEADS = size((6, 12, 2048, 16), (2, 2, 64, 4))
BATCH, IMAGE, TEXT, CHANNELS = size((4, 1024, 256, 64), (2, 32, 16, 16))
SKIP = ("modulation", "image_in", "text_in", "time_in", "head")
VARIANTS = changes("double_blocks", "single_blocks", skip=SKIP)


def attend(qkv: torch.Tensor) -> torch.Tensor:
    batch, length, _ = qkv.shape
    q, k, v = (
        each.view(batch, length, HEADS, WIDTH // HEADS).transpose(1, 2) for each in qkv.split(WIDTH, dim=2)
    )
    return functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, length, WIDTH)


def shifted(x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return functional.layer_norm(x, (WIDTH,)) * (1 + scale) + shift


class Stream(nn.Module):
    """One stream of a double block: its own projections, MLP and modulation."""

    def __init__(self) -> None:
        super().__init__()
        self.modulation = nn.Linear(WIDTH, 6 * WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def modulated(self, condition: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.modulation(functional.silu(condition))[:, None].chunk(6, dim=-1)

    def after(self, x: torch.Tensor, mixed: torch.Tensor, parts: tuple[torch.Tensor, ...]) -> torch.Tensor:
        x = x + parts[2] * self.proj(mixed)
        inner = functional.gelu(self.up(shifted(x, parts[3], parts[4])), approximate="tanh")
        return x + parts[5] * self.down(inner)


class DoubleBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = Stream(), Stream()

    def forward(
        self, image: torch.Tensor, text: torch.Tensor, condition: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        for_image, for_text = self.image.modulated(condition), self.text.modulated(condition)
        mixed = attend(
            torch.cat(
                (
                    self.text.qkv(shifted(text, for_text[0], for_text[1])),
                    self.image.qkv(shifted(image, for_image[0], for_image[1])),
                ),
                dim=1,
            )
        )
        of_text, of_image = mixed.split((text.shape[1], image.shape[1]), dim=1)
        return self.image.after(image, of_image, for_image), self.text.after(text, of_text, for_text)


class SingleBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.modulation = nn.Linear(WIDTH, 3 * WIDTH)
        self.inward, self.outward = nn.Linear(WIDTH, 7 * WIDTH), nn.Linear(5 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        shift, scale, gate = self.modulation(functional.silu(condition))[:, None].chunk(3, dim=-1)
        qkv, inner = self.inward(shifted(x, shift, scale)).split((3 * WIDTH, 4 * WIDTH), dim=-1)
        both = torch.cat((attend(qkv), functional.gelu(inner, approximate="tanh")), dim=-1)
        return x + gate * self.outward(both)


class Flux(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image_in, self.text_in = nn.Linear(CHANNELS, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.time_in = nn.Linear(WIDTH, WIDTH)
        self.double_blocks = nn.ModuleList(DoubleBlock() for _ in range(DOUBLE))
        self.single_blocks = nn.ModuleList(SingleBlock() for _ in range(SINGLE))
        self.head = nn.Linear(WIDTH, CHANNELS)

    def forward(self, noisy: torch.Tensor, prompt: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        image, text, condition = self.image_in(noisy), self.text_in(prompt), self.time_in(time)
        for block in self.double_blocks:
            image, text = block(image, text, condition)
        x = torch.cat((text, image), dim=1)
        for block in self.single_blocks:
            x = block(x, condition)
        return self.head(x[:, text.shape[1] :])


def build_model() -> nn.Module:
    with built():
        model = to_float8(Flux(), skip=SKIP)
    for block in (*model.double_blocks, *model.single_blocks):
        block.compile()
    return model


def example_batch() -> dict[str, torch.Tensor]:
    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16)

    return {
        "noisy": noise(BATCH, IMAGE, CHANNELS),
        "prompt": noise(BATCH, TEXT, WIDTH),
        "time": noise(BATCH, WIDTH),
    }


def loss(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return functional.mse_loss(output.float(), batch["noisy"].float())
