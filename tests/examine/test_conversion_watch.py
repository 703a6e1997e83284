"""Watching a conversion changes nothing of the script that converts."""

import contextlib
import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torchao.float8 import convert_to_float8_training

from fp8doctor.examine.fp8_conversion import ConversionWatch
from fp8doctor.facts import Facts


def test_watching_leaves_no_trace() -> None:
    before = dict(torch_module._global_module_registration_hooks)
    with contextlib.suppress(RuntimeError), ConversionWatch():
        assert dict(torch_module._global_module_registration_hooks) != before
        raise RuntimeError("a script's own")
    assert dict(torch_module._global_module_registration_hooks) == before


def test_watching_keeps_nothing_alive() -> None:
    with ConversionWatch() as watch:
        model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
        old, weight = weakref.ref(model[1]), weakref.ref(model[1].weight)
        convert_to_float8_training(model)
        assert len(watch.replacements) == 2
        del model
        gc.collect()
        assert old() is None
        assert weight() is None


def test_a_class_that_cannot_be_read_costs_the_fact_and_not_the_conversion(
    look: Callable[..., Facts], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*replaced: nn.Module) -> None:
        raise RuntimeError("a property of the user's")

    monkeypatch.setattr("fp8doctor.examine.fp8_conversion.replacement", broken)
    with ConversionWatch() as watch:
        model = convert_to_float8_training(nn.Sequential(nn.Linear(32, 32)))
    assert type(model[0]).__name__ == "Float8Linear"
    facts = look(model, watched=watch)
    assert "a property of the user's" in facts.gaps["training.conversion"]
    assert torch.is_tensor(model(torch.ones(16, 32)))
