"""Forms of activation checkpointing, found on real objects."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
    offload_wrapper,
)

from tests.examine.models import Stacked, by_name, llama, training

TOKENS = torch.arange(32).reshape(2, 16)


def marks(model: nn.Module) -> list[tuple[Any, ...]]:
    found = training(model).checkpointing
    return [(each.name, each.form, each.active, each.reentrant) for each in found]


def test_checkpoint_wrappers() -> None:
    model = Stacked()
    model.blocks[0] = checkpoint_wrapper(model.blocks[0])
    model.blocks[1] = checkpoint_wrapper(model.blocks[1], checkpoint_impl=CheckpointImpl.REENTRANT)
    model.blocks[2] = offload_wrapper(model.blocks[2])
    assert marks(model) == [("blocks.0", "wrapper", True, False), ("blocks.1", "wrapper", True, True)]


@pytest.mark.parametrize("reentrant", [True, False])
def test_huggingface_checkpointing(reentrant: bool) -> None:
    model = llama()
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    assert marks(model) == [(f"model.layers.{i}", "huggingface", True, reentrant) for i in (0, 1)]
    assert not any(active for _, _, active, _ in marks(model.eval()))
    model.activation_checkpointing_disable()
    assert marks(model) == []


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
