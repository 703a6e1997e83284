"""Small models that the tests of the checks convert and compile."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.quantization import quantize_

from tests import prototypes
from tests.examine.models import llama
from tests.stand_ins import transformer_engine as stand_in

Between = Callable[[torch.Tensor], torch.Tensor]


class Block(nn.Module):
    """A residual block with something between its two Linears."""

    def __init__(self, width: int = 64, between: Between = nn.functional.gelu) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.between = between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.between(self.up(x)))


class Decoder(nn.Module):
    """Four blocks, in a list or what is given, and a head if it has a width; ``outside`` runs before them."""

    def __init__(
        self,
        container: Callable[[list[Any]], Any] = nn.ModuleList,
        block: Callable[[], nn.Module] = Block,
        outside: Between = torch.relu,
        head: int | None = None,
    ) -> None:
        super().__init__()
        self.blocks, self.outside = container([block() for _ in range(4)]), outside
        self.head = nn.Linear(64, head) if head else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.outside(x)
        for block in self.blocks.children():
            x = block(x)
        return self.head(x)


def mlp(width: int = 256, hidden: int = 512, dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width)).to(dtype)


def llama_1b(width: int = 2048, hidden: int = 8192, kv_heads: int = 8, **sizes: Any) -> Any:
    """Llama 1B's shapes if nothing else is said, two layers and a small vocabulary, on the meta device."""
    sizes = {"vocab_size": 4096} | sizes
    heads = {"num_attention_heads": width // 64, "num_key_value_heads": kv_heads}
    return llama("meta", hidden_size=width, intermediate_size=hidden, **heads, **sizes).bfloat16()


def float8(model: nn.Module, recipe: str = "tensorwise", keep: tuple[str, ...] = (), **settings: Any) -> Any:
    """The model in BF16, and in FP8 but for the layers named; settings are for tensorwise scaling."""
    config = Float8LinearConfig.from_recipe_name(recipe)
    return convert_to_float8_training(
        model.bfloat16(),
        config=Float8LinearConfig(**settings) if settings else config,
        module_filter_fn=lambda layer, name: name not in keep,
    )


def mxfp8(model: Any, *, emulated: bool = False, keep: tuple[str, ...] = ()) -> Any:
    """The model with its Linears' weights in torchao's MXFP8 wrapper, but for the layers named."""
    config = prototypes.mxfp8("MXFP8_EMULATED_RCEIL" if emulated else "MXFP8_RCEIL")
    linears = lambda layer, name: isinstance(layer, nn.Linear) and name not in keep  # noqa: E731
    quantize_(model, config, filter_fn=linears)
    return model


def by_block(blocks: Any, **settings: Any) -> None:
    """Compile each in place."""
    for block in blocks:
        block.compile(**settings)


def ran_in_te(
    monkeypatch: pytest.MonkeyPatch, recipe: str, kind: str = "Linear", rows: int = 64, **settings: Any
) -> Any:
    """A layer of the stand-in for Transformer Engine after a forward under a recipe with these attributes."""
    te: Any = stand_in.install(monkeypatch, "quantization")
    chosen = getattr(stand_in, recipe)()
    vars(chosen).update(settings)
    model = nn.Sequential(getattr(te, kind)(64, 64))
    with te.autocast(recipe=chosen):
        model(torch.zeros(rows, 64))
    return model
