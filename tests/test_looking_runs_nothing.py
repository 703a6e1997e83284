"""A look at a live model calls no forward, copies nothing and forks nothing."""

from __future__ import annotations

import ast
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torchao.float8 import convert_to_float8_training

import fp8doctor
from fp8doctor import inspect_model
from fp8doctor.facts import recorded

PACKAGE = Path(fp8doctor.__file__).parent


class Telling:
    """Writes into a file what happens to it, in whichever process."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def told(self, what: str) -> None:
        with self.file.open("a") as file:
            file.write(f"{what}\n")

    def __deepcopy__(self, memo: Any) -> Telling:
        self.told("copied")
        return Telling(self.file)

    def __reduce__(self) -> Any:
        self.told("pickled")
        return Telling, (self.file,)

    def __del__(self) -> None:
        self.told("deleted")


class Model(nn.Module):
    """fp32, with an autocast and a checkpoint function in its code: only a forward shows what it calls."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
        self.telling = Telling(file)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.telling.told("called")
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False)
        return x


def inspected(model: nn.Module) -> Any:
    return inspect_model(model, torch.ones(16, 32), trial=False).facts


def planned(model: nn.Module) -> Any:
    fp8doctor.plan(model, gpus="H100")


@pytest.mark.parametrize("look", [inspected, planned])
def test_nothing_of_the_users_runs(
    look: Callable[[nn.Module], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = convert_to_float8_training(Model(tmp_path / "told"))
    monkeypatch.delattr(os, "fork")
    look(model)
    assert not (tmp_path / "told").exists()


def test_what_only_a_forward_shows_is_unknown(tmp_path: Path) -> None:
    facts = inspected(convert_to_float8_training(Model(tmp_path / "told")))
    assert [each.active for each in facts.training.checkpointing] == [None]
    assert not recorded(facts, "training.autocast_within")
    assert not recorded(facts, "workload.rows")
    assert {"network.linears.checkpointed", "training.autocast_within", "workload.rows"} <= set(facts.gaps)


KNOWN = {
    ("loading/config_model.py", "deepcopy"),
    ("api.py", "replicate"),
    ("running/launch.py", "fork"),
}
"""Calls outside of the trial and the worker: they begin a trial, are of records and configurations, read a
Trainer's data, or fork the process that reports."""


def test_only_the_trial_and_the_worker_copy_a_model_or_run_it() -> None:
    watched = {"deepcopy", "replicate", "with_forward", "fork"}
    found = {
        (str(file.relative_to(PACKAGE)), name)
        for file in PACKAGE.rglob("*.py")
        if file.relative_to(PACKAGE).parts[0] not in ("trial", "worker")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call)
        and (name := getattr(node.func, "attr", getattr(node.func, "id", ""))) in watched
    }
    assert found == KNOWN
