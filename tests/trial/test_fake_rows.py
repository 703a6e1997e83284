"""The rows of every layer, counted on fake tensors in another process, of real models without a GPU."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torchao.float8 import convert_to_float8_training
from transformers import LlamaConfig, LlamaForCausalLM

from fp8doctor.examine import examine
from fp8doctor.facts import Facts, recorded
from fp8doctor.loading.job import Job
from fp8doctor.trial.layers import fake_forward
from tests.trial.test_rows import Frames, frames
from tests.trial.test_shapes import job


def counted(of: Job) -> Facts:
    return fake_forward.with_forward(of, examine(of))


def reason(facts: Facts) -> str:
    assert not recorded(facts, "workload.rows")
    return facts.gaps["workload.rows"]


@pytest.mark.slow
def test_every_layer_has_its_own_rows_in_a_cut_and_beside_it() -> None:
    facts = counted(frames(30))
    assert facts.workload.rows == {
        "frames": (16 * 32,),
        "head": (16,),
        **{f"b.{block}.{layer}": (16 * 4,) for block in range(30) for layer in range(2)},
    }


@pytest.mark.slow
def test_a_decoder_on_the_meta_device() -> None:
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=2,
        vocab_size=64,
        use_cache=False,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).bfloat16()
    convert_to_float8_training(model, module_filter_fn=lambda layer, name: name != "lm_head")
    ids = torch.zeros(2, 24, dtype=torch.long)
    facts = counted(replace(job(model), batch={"input_ids": ids, "labels": ids}))
    assert set(facts.workload.rows.values()) == {(48,)}
    assert len(facts.workload.rows) == len(facts.linears())


class Caching(nn.Module):
    """Its mask is kept by a function of the module that it is from, as users' masks are."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x) + mask(x.shape[-1])


@functools.lru_cache
def mask(size: int) -> torch.Tensor:
    return torch.rand(size)


def test_what_the_model_caches_and_draws_stays_as_it_was() -> None:
    mask.cache_clear()
    of = replace(job(convert_to_float8_training(Caching())), batch=torch.ones(48, 32))
    before = torch.get_rng_state()
    assert counted(of).workload.rows == {"up": (48,)}
    assert torch.equal(torch.get_rng_state(), before)
    assert mask.cache_info().currsize == 0
    assert type(of.model(of.batch)) is torch.Tensor


class OnGpu(torch.Tensor):
    """Stands in for a tensor of a GPU in a forked process: it has a size, and whatever is done with it
    raises."""

    @staticmethod
    def __new__(cls, *size: int) -> OnGpu:
        return torch.Tensor._make_wrapper_subclass(cls, size, dtype=torch.bfloat16, device="cuda")

    @classmethod
    def __torch_dispatch__(cls, operation: Any, *_: Any, **__: Any) -> Any:
        raise RuntimeError(f"Cannot re-initialize CUDA in forked subprocess ({operation})")


class Holding(nn.Module):
    """Holds tensors of the GPU as a buffer, as a plain attribute and in containers."""

    def __init__(self, kept: Any = None) -> None:
        super().__init__()
        self.up = nn.Linear(32, 32, bias=False, dtype=torch.bfloat16)
        self.register_buffer("shift", OnGpu(32))
        self.scale, self.several, self.kept = OnGpu(32), {"more": [OnGpu(32)]}, kept

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x) * self.scale + self.shift + self.several["more"][0]


class Cache:
    """An object of the user's own that keeps a tensor."""

    def __init__(self) -> None:
        self.kept = OnGpu(32)


@pytest.mark.parametrize("kept", [None, Cache], ids=["none", "in an object"])
def test_a_model_on_a_gpu_is_counted_without_touching_it(kept: Callable[[], Any] | None) -> None:
    of = replace(job(convert_to_float8_training(Holding(kept and kept()))), batch={"x": OnGpu(48, 32)})
    with pytest.raises(RuntimeError, match="Cannot re-initialize CUDA"):
        of.model.scale.neg()
    assert counted(of).workload.rows == {"up": (48,)}
    assert type(of.model.scale) is OnGpu


def asks_for_data(x: torch.Tensor) -> None:
    assert x.sum().item() > 0


def takes_for_ever(x: torch.Tensor) -> None:
    time.sleep(600)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("act", "told"),
    [
        (asks_for_data, "a forward on fake tensors raises "),
        (takes_for_ever, "a forward on fake tensors ended"),
    ],
)
def test_a_forward_that_cannot_be_run_leaves_them_unknown(
    act: Callable[[torch.Tensor], None], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def step(model: Any, batch: Any) -> Any:
        act(batch)
        return model(batch)

    if act is takes_for_ever:
        monkeypatch.setattr(fake_forward, "LONGEST_S", 0.5)
    assert reason(counted(replace(frames(), training_step=step))).startswith(told)


def test_without_a_batch_or_without_fp8_nothing_is_counted() -> None:
    assert reason(counted(replace(frames(), batch=None))) == "there is no batch to run the model on"
    plain = replace(frames(), model=Frames())
    assert not recorded(counted(plain), "workload.rows")
