"""The rows of every layer, and an autocast's recipe, seen on fake tensors in another process."""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torchao.float8 import convert_to_float8_training

from fp8doctor.examine import examine
from fp8doctor.facts import recorded
from fp8doctor.trial.layers import fake_forward, rows
from fp8doctor.trial.layers.seen_calls import CallsSeen
from tests.examine.models import llama
from tests.stand_ins import transformer_engine as te
from tests.trial.test_rows import Experts, frames, job, watched, with_fakes

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


def test_fake_ends_have_no_numbers_so_the_rows_of_all_experts_are_counted_together() -> None:
    with FakeTensorMode():
        experts, other = Experts("grouped"), nn.Parameter(torch.randn(3, 4, 4))
        products = rows.Products({}, {"up": experts.up, "other": other}, CallsSeen())
        with products:
            experts(torch.randn(8, 16, dtype=torch.bfloat16))
    assert products.rows() == {"up": (8,)}


def test_a_decoder_on_the_meta_device() -> None:
    model = llama("meta", use_cache=False).bfloat16()
    convert_to_float8_training(model, module_filter_fn=lambda layer, name: name != "lm_head")
    ids = torch.zeros(2, 24, dtype=torch.long)
    facts = with_fakes(replace(job(model), batch={"input_ids": ids, "labels": ids}))
    assert facts.workload.rows == dict.fromkeys((each.name for each in facts.linears()), (48,))


class OnGpu(torch.Tensor):
    """Stands in for a tensor of a GPU: it has a size, and whatever is done with it
    raises."""

    @staticmethod
    def __new__(cls, *size: int) -> OnGpu:
        return torch.Tensor._make_wrapper_subclass(cls, size, dtype=torch.bfloat16, device="cuda")

    @classmethod
    def __torch_dispatch__(cls, operation: Any, *_: Any, **__: Any) -> Any:
        raise RuntimeError(f"it is touched ({operation})")


class Holding(nn.Module):
    """Holds tensors of the GPU as a buffer, as a plain attribute, in containers and in an object."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(32, 32, bias=False, dtype=torch.bfloat16)
        self.register_buffer("shift", OnGpu(32))
        self.scale, self.several, self.kept = (
            OnGpu(32),
            {"more": [OnGpu(32)]},
            SimpleNamespace(kept=OnGpu(32)),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x) * self.scale + self.shift + self.several["more"][0]


def test_a_model_on_a_gpu_is_counted_without_touching_it() -> None:
    of = replace(job(convert_to_float8_training(Holding())), batch={"x": OnGpu(48, 32)})
    with pytest.raises(RuntimeError, match="it is touched"):
        of.model.scale.neg()
    assert with_fakes(of).workload.rows == {"up": (48,)}
    assert type(of.model.scale) is OnGpu


class Keeping(nn.Module):
    """Keeps its recipe where its code does not name it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.recipe = te.Linear(64, 64), te.Float8CurrentScaling()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with te.autocast(recipe=self.recipe):
            return self.layer(x)


def test_the_forward_shows_the_recipe_of_an_autocast_that_it_opens(monkeypatch: pytest.MonkeyPatch) -> None:
    te.install(monkeypatch)
    of = job(Keeping().bfloat16())
    assert [each.recipe for each in examine(of).network.linears] == [None]
    assert [each.recipe for each in watched(of).network.linears] == ["current"]
    assert of.model.layer.fp8_meta.get("recipe") is None


def asks_for_data(model: nn.Module, x: torch.Tensor) -> None:
    assert x.sum().item() > 0


def takes_for_ever(model: nn.Module, x: torch.Tensor) -> None:
    time.sleep(600)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"training_step": asks_for_data}, "a forward on fake tensors raises "),
        ({"training_step": takes_for_ever}, "a forward on fake tensors takes over"),
        ({"batch": None}, "there is no batch to run the model on"),
    ],
)
def test_without_a_forward_they_are_unknown(
    change: dict[str, Any], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake_forward, "LONGEST_S", 3.0)
    facts = with_fakes(replace(frames(), **change))
    assert not recorded(facts, "workload.rows")
    assert facts.gaps["workload.rows"].startswith(told)
