"""The fixture for users' tests. That pytest finds it by itself is held by tests/packaging."""

import ast
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
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


@pytest.mark.slow
def test_a_model_is_examined(fp8doctor: Callable[..., Report]) -> None:  # noqa: F811
    model = convert_to_float8_training(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).bfloat16())
    batch = torch.ones(32, 64, dtype=torch.bfloat16)
    report = fp8doctor(model, batch)
    assert report.facts.workload.tokens == 32
    with pytest.raises(ReportFailed, match="CMP001"):
        fp8doctor(model, batch, fail_on="warning")
    assert fp8doctor(model, batch, fail_on="warning", ignore="CMP,ENV,MOD,SHP,STP,NUM")


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).bfloat16()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "fails"),
    [
        (convert_to_float8_training(plain()), False),
        (plain(), True),
        (convert_to_float8_training(plain(), module_filter_fn=lambda *_: False), True),
    ],
    ids=["fp8", "bf16", "a filter that takes nothing"],
)
def test_the_example_of_the_docs(
    model: nn.Module,
    fails: bool,
    fp8doctor: Callable[..., Report],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    project = ModuleType("my_project")
    vars(project)["build_model"] = lambda: model
    monkeypatch.setitem(sys.modules, "my_project", project)
    names: dict[str, Any] = {}
    exec(compile(fenced("example: pytest"), "docs/api.md", "exec"), names)
    said = r"FP8 is required\. No layer of this model trains in FP8 \(0 of 2 Linears\)\."
    with pytest.raises(ReportFailed, match=said) if fails else nullcontext() as failed:
        names["test_fp8_is_engaged"](fp8doctor)
    assert not fails or failed.value.findings == ()


@pytest.mark.slow
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
