"""The fixture for users' tests. That pytest finds it by itself is held by tests/packaging."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torchao.float8 import convert_to_float8_training

from fp8doctor.integrations import pytest as plugin
from fp8doctor.integrations.pytest import fp8doctor  # noqa: F401
from fp8doctor.report import Report, ReportFailed
from tests.markdown import fenced

ROOT = Path(__file__).resolve().parents[2]


def test_a_model_is_examined(fp8doctor: Callable[..., Report]) -> None:  # noqa: F811
    model = convert_to_float8_training(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).bfloat16())
    batch = torch.ones(32, 64, dtype=torch.bfloat16)
    report = fp8doctor(model, batch)
    assert report.facts.workload.tokens == 32
    with pytest.raises(ReportFailed, match="CMP001"):
        fp8doctor(model, batch, fail_on="warning")
    assert fp8doctor(model, batch, fail_on="warning", ignore="CMP,ENV,MOD,SHP,STP,NUM")


def test_the_example_of_the_readme(
    fp8doctor: Callable[..., Report],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    project = ModuleType("my_project")
    vars(project)["build_model"] = lambda: nn.Sequential(nn.Linear(64, 64))
    monkeypatch.setitem(sys.modules, "my_project", project)
    names: dict[str, Any] = {}
    exec(compile(fenced("example: pytest"), "docs/api.md", "exec"), names)
    names["test_fp8_is_engaged"](fp8doctor)


def test_pytest_starts_without_torch() -> None:
    code = f"import pytest, sys, {plugin.__name__} as plugin; print(sorted(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=600
    )
    modules = set(ast.literal_eval(done.stdout))
    assert not modules & {"torch", "transformers", "lightning", "accelerate", "numpy", "msgspec"}
    assert {each for each in modules if each.startswith("fp8doctor")} == {
        "fp8doctor",
        "fp8doctor.integrations",
        plugin.__name__,
    }
