"""A few models of others and of our own each night; all by `python -m research.zoo`."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from research.zoo.animals import Animal, floats, of_transformers
from research.zoo.course import STATES, take

WIDTH = 768


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


class OfLists(nn.Module):
    """Blocks are lists that are never called, as in vit_pytorch and x_transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Sequential(nn.Identity(), nn.Linear(WIDTH, WIDTH))
        self.layers = nn.ModuleList(nn.ModuleList([Block(), Block()]) for _ in range(2))
        self.head = nn.Linear(WIDTH, 1008)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x)
        for first, second in self.layers:
            x = second(first(x))
        return self.head(x)


class OfDicts(OfLists):
    """Blocks are dictionaries."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({"class": Block(), "feed-forward": Block()}) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x)
        for each in self.layers:
            x = each["feed-forward"](each["class"](x))
        return self.head(x)


class OfSequentials(OfLists):
    """Blocks are of torch.nn, in a list whose name is a number."""

    def __init__(self) -> None:
        super().__init__()
        del self.layers
        self.add_module(
            "0", nn.ModuleList(nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(2))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x)
        for block in self.get_submodule("0"):
            x = block(x)
        return self.head(x)


OWN = [Animal(each.__name__, each, {"0": floats(2, 16, WIDTH)}) for each in (OfLists, OfDicts, OfSequentials)]
CHOSEN = ("LlamaForCausalLM", "GPT2LMHeadModel", "FunnelForMaskedLM", "DINOv3ViTModel")


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("animal", OWN, ids=lambda animal: animal.name)
def test_what_is_printed_runs_and_mends(animal: Animal, state: str) -> None:
    if "LoRA" in state:
        pytest.importorskip("peft")
    course = take(animal, state)
    assert course.rounds
    assert course.defects == []


@pytest.mark.parametrize("animal", list(of_transformers(*CHOSEN)), ids=lambda a: a.name)
def test_what_is_printed_runs_and_mends_on_models_of_others(animal: Animal) -> None:
    course = take(animal, "everything converted")
    assert course.rounds[-1] == ()
    assert course.defects == []
