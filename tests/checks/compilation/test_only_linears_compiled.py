"""CMP004 on real torchao models: Linears that are compiled alone, and what covers them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torchao.float8 import convert_to_float8_training
from torchao.float8.float8_linear import Float8Linear

from fp8doctor.checks.compilation.only_linears_compiled import only_linears_compiled
from fp8doctor.facts import Facts
from fp8doctor.finding import Finding, NotApplicable

Look = Callable[..., Facts]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(32, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.fixture
def decoder() -> nn.Module:
    return convert_to_float8_training(Decoder().bfloat16())


def each_in_place(model: Any) -> None:
    for module in model.modules():
        if isinstance(module, Float8Linear):
            module.compile()


def each_wrapped(model: Any) -> None:
    for block in model.blocks:
        block.up, block.down = torch.compile(block.up), torch.compile(block.down)
    model.head = torch.compile(model.head)


def each_forward(model: Any) -> None:
    for module in model.modules():
        if isinstance(module, Float8Linear):
            module.forward = torch.compile(module.forward)


@pytest.mark.parametrize("compiled", [each_in_place, each_wrapped, each_forward])
def test_every_way_to_compile_linears_alone(
    compiled: Callable[[Any], None], decoder: nn.Module, look: Look
) -> None:
    compiled(decoder)
    finding = only_linears_compiled(look(decoder))
    assert isinstance(finding, Finding)
    assert finding.title == "7 of 7 compiled FP8 Linears are compiled one by one"
    assert finding.treatment is not None
    assert finding.treatment.name == "compile-blocks"
    exec(finding.treatment.code, {"model": decoder})
    assert only_linears_compiled(look(decoder)) is None


@pytest.mark.parametrize("whole", [torch.compile, lambda model: model.compile() or model])
def test_a_region_around_them_is_what_counts(
    whole: Callable[[Any], Any], decoder: nn.Module, look: Look
) -> None:
    each_in_place(decoder)
    assert only_linears_compiled(look(whole(decoder))) is None


@pytest.mark.slow
def test_marks_inside_a_compiled_block_make_no_graphs_of_their_own() -> None:
    """What the page says of the compiler."""
    graphs = []
    for around in (False, True):
        torch._dynamo.reset()
        block, counter = convert_to_float8_training(Block().bfloat16()), CompileCounter()
        for module in (block.up, block.down, *((block,) if around else ())):
            module.compile(backend=counter)
        block(torch.zeros(16, 32, dtype=torch.bfloat16))
        graphs.append(counter.frame_count)
    assert graphs == [2, 1]


def test_a_head_beside_compiled_blocks_may_be_compiled_alone(decoder: Any, look: Look) -> None:
    for block in decoder.blocks:
        block.compile()
    decoder.head.compile()
    assert only_linears_compiled(look(decoder)) is None


@pytest.mark.parametrize("blocks", [0, 2])
def test_many_linears_beside_the_blocks(blocks: int, look: Look) -> None:
    beside = nn.Sequential(*(nn.Linear(32, 32) for _ in range(6)))
    model = nn.Sequential(beside, nn.Sequential(*(Block() for _ in range(blocks))))
    model = convert_to_float8_training(model.bfloat16())
    each_in_place(model)
    finding = only_linears_compiled(look(model))
    assert isinstance(finding, Finding)
    assert finding.treatment is not None
    names = {"model": model, "torch": torch}
    exec(finding.treatment.code, names)
    assert only_linears_compiled(look(names["model"])) is None


def test_a_model_that_is_one_linear(look: Look) -> None:
    model = convert_to_float8_training(nn.Linear(32, 32).bfloat16())
    model.compile()
    assert only_linears_compiled(look(model)) is None


def test_not_asked_of_eager_or_of_16_bit_layers(decoder: nn.Module, look: Look) -> None:
    assert isinstance(only_linears_compiled(look(decoder)), NotApplicable)
    plain: Any = Decoder().bfloat16()
    plain.head.compile()
    assert isinstance(only_linears_compiled(look(plain)), NotApplicable)
