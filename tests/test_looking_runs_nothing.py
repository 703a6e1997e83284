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


KNOWN = {("loading/config_model.py", "deepcopy"), ("api.py", "replicate"), ("running/launch.py", "fork")}
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


NAMES = set("model module root net layer block replica inner call step training_step forward".split())
METHODS = set("model module training_step forward functional_call __call__".split())
"""Names and attributes by which code calls a module or a step of the user's. A function that is defined or
imported in the file is none."""

PASSED_ON = {
    ("running/calls.py", "call"): "the script's own call, which the watch sees",
    ("stacks/transformer_engine.py", "inner"): "the forward of a copy, which a treatment has replaced",
}


def called_modules(text: str) -> set[str]:
    tree = ast.parse(text)
    imports = (each for each in ast.walk(tree) if isinstance(each, ast.ImportFrom))
    functions = {each.name for each in ast.walk(tree) if isinstance(each, ast.FunctionDef)}
    functions |= {alias.asname or alias.name for each in imports for alias in each.names}
    calls = [each.func for each in ast.walk(tree) if isinstance(each, ast.Call)]
    names = {each.id for each in calls if isinstance(each, ast.Name)} & NAMES - functions
    return names | {each.attr for each in calls if isinstance(each, ast.Attribute)} & METHODS


def test_no_forward_of_the_users_runs_but_in_the_trial_and_the_worker() -> None:
    called = {
        (str(file.relative_to(PACKAGE)), name)
        for file in PACKAGE.rglob("*.py")
        for name in called_modules(file.read_text())
    }
    outside = {each for each in called if each[0].partition("/")[0] not in ("trial", "worker")}
    assert outside == set(PASSED_ON)
    assert {("trial/copies/step.py", "model"), ("trial/layers/rows.py", "training_step")} <= called


@pytest.mark.parametrize(
    "planted",
    [
        "output = model(**batch)",
        "loss = self.model(batch)",
        "job.training_step(job.model, job.batch)",
        "whole = torch.func.functional_call(inner, buffers, args)",
        "module.forward(x)",
        "type(each).__call__(each, x)",
    ],
)
def test_a_forward_would_be_seen(planted: str) -> None:
    assert called_modules(planted)
