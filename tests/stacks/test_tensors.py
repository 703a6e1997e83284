"""Batches come in whatever a user's collate function makes: a copy holds copies of its tensors and is of the
same kind."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from transformers import BatchEncoding
from transformers.modeling_outputs import BaseModelOutput

from fp8doctor.facts import Target
from fp8doctor.loading.synthetic_batch import job_of
from fp8doctor.stacks.tensors import named_tensors
from fp8doctor.trial.copies.step import move

CPU = torch.device("cpu")


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


@dataclass(frozen=True)
class Frozen:
    x: Tensor
    y: Tensor
    name: str = "frozen"


@dataclass
class Nested:
    inner: Frozen
    y: list[Tensor]
    unset: Tensor = field(init=False)


class Plain:
    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y, self.itself = x, y, self


class Graph:
    """Moves itself, in place, as the batches of a graph library do; its tensors are behind properties."""

    __slots__ = ("store",)

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.store = {"x": x, "y": y}

    def to(self, device: torch.device) -> Graph:
        self.store = {key: each.to(device) for key, each in self.store.items()}
        return self


X, Y = torch.ones(4, 16), torch.zeros(4, 16)
BATCHES: dict[str, tuple[Any, Callable[[Any], tuple[Tensor, Tensor]]]] = {
    "tuple": ((X, Y), tuple),
    "list": ([X, Y], tuple),
    "dict": ({"x": X, "y": Y}, lambda batch: (batch["x"], batch["y"])),
    "OrderedDict": (OrderedDict(x=X, y=Y), lambda batch: (batch["x"], batch["y"])),
    "BatchEncoding": (BatchEncoding({"x": X, "y": Y}), lambda batch: (batch.x, batch.y)),
    "ModelOutput": (
        BaseModelOutput(last_hidden_state=X, hidden_states=(Y,)),  # type: ignore[arg-type]
        lambda batch: (batch.last_hidden_state, batch.hidden_states[0]),
    ),
    "named tuple": (Pair(X, Y), lambda batch: (batch.x, batch.y)),
    "frozen dataclass": (Frozen(X, Y), lambda batch: (batch.x, batch.y)),
    "dataclasses": (Nested(Frozen(X, Y), [Y]), lambda batch: (batch.inner.x, batch.y[0])),
    "namespace": (SimpleNamespace(x=X, y=Y), lambda batch: (batch.x, batch.y)),
    "object": (Plain(X, Y), lambda batch: (batch.x, batch.y)),
    "graph": (Graph(X, Y), lambda batch: (batch.store["x"], batch.store["y"])),
}


@pytest.mark.parametrize("name", BATCHES)
def test_a_copy_is_of_the_same_kind_and_shares_no_tensor(name: str) -> None:
    batch, parts = BATCHES[name]
    copied = move(batch, CPU)
    assert type(copied) is type(batch)
    for ours, theirs in zip(parts(copied), (X, Y), strict=True):
        assert torch.equal(ours, theirs)
        assert ours.data_ptr() != theirs.data_ptr()
    assert [each.data_ptr() for each in parts(batch)] == [X.data_ptr(), Y.data_ptr()], "theirs is left alone"


def test_what_cannot_move_itself_or_be_written_to_is_moved_as_far_as_that_can_be() -> None:
    class Broken(Plain):
        def to(self, device: torch.device) -> Broken:
            raise NotImplementedError

    assert move(Broken(X, Y), torch.device("meta")).x.device.type == "meta"
    assert move(MappingProxyType({"x": X}), torch.device("meta"))["x"].device.type == "meta"


def test_fields_name_their_tensors_and_size_the_step() -> None:
    assert [name for name, _ in named_tensors(Frozen(X, Y))] == ["x", "y"]

    @dataclass
    class Tokens:
        attention_mask: Tensor
        labels: Tensor
        input_ids: Tensor

    batch = Tokens(torch.ones(2, 9), torch.ones(2, 9, dtype=torch.long), torch.ones(2, 8, dtype=torch.long))
    work = job_of(nn.Linear(1, 1), Target(), batch).workload
    assert (work.batch_size, work.sequence_length, work.tokens) == (2, 8, 16)
