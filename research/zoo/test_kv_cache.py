"""`Training.use_cache` against what transformers' models do in a training forward: whether a cache is made is
counted."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import Trainer, TrainingArguments
from transformers.cache_utils import Cache

from tests.examine.models import llama, training, vit
from tests.test_untouched_models import DECODERS, ENCODERS, Untouched


@pytest.fixture
def caches(monkeypatch: pytest.MonkeyPatch) -> list[Cache]:
    """Every cache that is made."""
    made: list[Cache] = []
    original = Cache.__init__

    @functools.wraps(original)
    def counted(self: Cache, *arguments: Any, **settings: Any) -> None:
        made.append(self)
        original(self, *arguments, **settings)

    monkeypatch.setattr(Cache, "__init__", counted)
    return made


def step(model: nn.Module, device: str = "cpu") -> None:
    ids = torch.ones((2, 16), dtype=torch.long, device=device)
    model(input_ids=ids, labels=ids)


@pytest.mark.slow
@pytest.mark.parametrize("untouched", [*DECODERS, *ENCODERS], ids=lambda each: each.model)
def test_what_transformers_does(untouched: Untouched, caches: list[Cache]) -> None:
    model = untouched.build().train()
    step(model, "meta")
    assert bool(training(model).use_cache) is bool(caches)


@pytest.mark.slow
@pytest.mark.parametrize("change", ["none", "switched off", "checkpointed", "adapted"])
def test_what_is_done_to_a_model(change: str, caches: list[Cache]) -> None:
    model: Any = llama(use_cache=change != "switched off").train()
    if change == "checkpointed":
        model.gradient_checkpointing_enable()
    if change == "adapted":
        model = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear"))
    step(model)
    assert training(model).use_cache is bool(caches) is (change in ("none", "adapted"))


@pytest.mark.slow
def test_a_trainer_switches_it_off(forget_accelerate: None, tmp_path: Any) -> None:
    model = llama(use_cache=True)
    arguments = TrainingArguments(
        output_dir=str(tmp_path), report_to=[], use_cpu=True, max_steps=1, per_device_train_batch_size=1
    )
    ids = torch.ones(8, dtype=torch.long)
    assert training(model).use_cache is True
    trainer = Trainer(model=model, args=arguments, train_dataset=[{"input_ids": ids, "labels": ids}])
    assert training(model, trainer=trainer).use_cache is False
    trainer.train()
    assert training(model, trainer=trainer).use_cache is model.config.use_cache is False
    asked = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, use_cache=True)
    model = llama(use_cache=True)
    assert training(model, trainer=Trainer(model=model, args=asked)).use_cache is True


def test_models_without_a_cache() -> None:
    assert training(nn.Linear(4, 4)).use_cache is training(vit()).use_cache is None
