"""Forms of activation checkpointing, found on real objects."""

from __future__ import annotations

import pytest
import torch
import torch._functorch.config
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
    offload_wrapper,
)

from fp8doctor.facts import Checkpointing
from tests.examine.models import Stacked, by_name, llama, training

TOKENS = torch.arange(32).reshape(2, 16)


def test_checkpoint_and_offload_wrappers() -> None:
    model = Stacked()
    model.blocks[0] = checkpoint_wrapper(model.blocks[0])
    model.blocks[1] = checkpoint_wrapper(model.blocks[1], checkpoint_impl=CheckpointImpl.REENTRANT)
    model.blocks[2] = offload_wrapper(model.blocks[2])
    assert training(model).checkpointing == (
        Checkpointing(name="blocks.0", form="wrapper", active=True, reentrant=False),
        Checkpointing(name="blocks.1", form="wrapper", active=True, reentrant=True),
        Checkpointing(name="blocks.2", form="offload", active=True, reentrant=None),
    )


@pytest.mark.parametrize("reentrant", [True, False])
def test_huggingface_checkpointing(reentrant: bool) -> None:
    model = llama()
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    assert training(model).checkpointing == tuple(
        Checkpointing(name=f"model.layers.{i}", form="huggingface", active=True, reentrant=reentrant)
        for i in (0, 1)
    )
    assert not any(each.active for each in training(model.eval()).checkpointing)
    model.activation_checkpointing_disable()
    assert training(model).checkpointing == ()


def test_unsloths_patch(monkeypatch: pytest.MonkeyPatch) -> None:
    def unsloth_checkpoint() -> None:
        """A stand-in: unsloth cannot be imported without a GPU."""

    monkeypatch.setattr(torch.utils.checkpoint, "checkpoint", unsloth_checkpoint)
    assert training(Stacked()).checkpointing == (
        Checkpointing(name="", form="unsloth", active=None, reentrant=None),
    )
    model = llama()
    model.activation_checkpointing_enable()
    assert training(model).checkpointing[-1] == Checkpointing(
        name="", form="unsloth", active=True, reentrant=None
    )


def test_memory_budget_of_the_compiler() -> None:
    with torch._functorch.config.patch(activation_memory_budget=0.5):
        assert training(Stacked()).checkpointing == (
            Checkpointing(name="", form="compiler_budget", active=True, reentrant=None),
        )


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
