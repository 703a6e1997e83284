"""What compiled regions and checkpointed ones cover of the module tree, and which blocks repeat."""

from __future__ import annotations

import torch
import torch.distributed
from torch import nn

from tests.examine.models import (
    Block,
    Stacked,
    by_name,
    network,
)


def test_compiled_step_covers_all() -> None:
    step = torch.compile(lambda model, batch: model(batch).mean())
    assert {each.compiled for each in network(Stacked(), training_step=step).linears} == {""}


def test_disabled_module_is_not_covered() -> None:
    model = Stacked()
    model.compile()
    model.blocks[1].forward = torch.compiler.disable(model.blocks[1].forward)
    linears = by_name(model)
    assert [linears[f"blocks.{i}.up"].compiled for i in range(3)] == ["", None, ""]


def test_flag_on_the_model_covers_its_blocks() -> None:
    """Models of transformers before 4.53, and remote code today, decide above the list of blocks."""
    model = Stacked()
    model.gradient_checkpointing = True
    linears = by_name(model)
    assert [linears[name].checkpointed for name in ("blocks.0.up", "blocks.2.down", "head")] == [
        "blocks.0",
        "blocks.2",
        None,
    ]


def test_blocks_in_a_dictionary() -> None:
    """torchtitan keeps its layers in a ModuleDict."""
    model = nn.ModuleDict({"layers": nn.ModuleDict({str(i): Block() for i in range(2)})})
    (blocks,) = network(model).blocks
    assert (blocks.name, blocks.container, blocks.count) == ("layers", "ModuleDict", 2)


def test_hooks() -> None:
    model = Stacked()
    model.blocks[0].register_forward_pre_hook(lambda module, arguments: None)
    model.head.register_forward_hook(lambda module, arguments, output: None)
    model.head.register_full_backward_hook(lambda module, given, taken: None)
    assert network(model).hooks == 3
