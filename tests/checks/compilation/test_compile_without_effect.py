"""CMP002 on real marks, a real Dynamo and real variables: each cause fires, and its treatment makes it silent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn
from torchao.float8 import convert_to_float8_training

from fp8doctor.checks.compilation.compile_without_effect import SICK, compile_without_effect
from fp8doctor.facts import Dynamo, Facts, Software
from fp8doctor.finding import Finding, NotApplicable

ROOT = Path(__file__).resolve().parents[3]

Look = Callable[..., Facts]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.gelu(self.up(x)))


@pytest.fixture
def model() -> nn.Module:
    return convert_to_float8_training(Model().bfloat16())


@pytest.fixture
def clean_dynamo() -> Iterator[None]:
    """Counters and metrics of failed compilations do not reach the next test."""
    import torch._dynamo.utils as utilities

    yield
    torch._dynamo.reset()
    utilities.counters.clear()
    utilities.clear_compilation_metrics()


def found(facts: Facts) -> Finding:
    finding = compile_without_effect(facts)
    assert isinstance(finding, Finding)
    return finding


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_backend_without_kernels(backend: str, model: nn.Module, look: Look) -> None:
    model.compile(backend=backend)
    finding = found(look(model, tokens=1024))
    assert f"backend={backend!r}, which generates no kernel" in finding.title
    assert finding.evidence["idle_fp8_linears"] == 2
    assert finding.saving_ms is not None
    model.compile()
    assert compile_without_effect(look(model, tokens=1024)) is None


def compile_forward(module: Any) -> Any:
    module.forward = torch.compile(module.forward, backend="eager")
    return module


def compile_in_place(module: Any) -> Any:
    module.compile(backend="eager")
    return module


@pytest.mark.parametrize(
    ("mark", "line"),
    [
        (compile_in_place, "model[0].compile()"),
        (lambda module: torch.compile(module, backend="eager"), "model[0] = torch.compile(model[0])"),
        (compile_forward, "model[0].forward = torch.compile(model[0].forward)"),
    ],
    ids=["in place", "wrapped", "forward"],
)
def test_the_printed_line_is_the_one_of_the_user_without_its_backend(mark: Callable[[Any], Any], line: str, look: Look) -> None:
    def build() -> nn.Module:
        return nn.Sequential(*(convert_to_float8_training(Model().bfloat16()) for _ in range(2)))

    finding = found(look(nn.Sequential(*(mark(block) for block in build())), tokens=1024))
    assert finding.treatment is not None
    assert finding.treatment.code == f"{line}   # without backend='eager', and so for 1 more"
    model = build()
    for other in (finding.treatment.code, finding.treatment.code.replace("[0]", "[1]")):
        exec(other, {"model": model, "torch": torch})
    assert compile_without_effect(look(model, tokens=1024)) is None


def test_one_block_of_two_with_a_backend_without_kernels(look: Look) -> None:
    model = nn.Sequential(*(convert_to_float8_training(Model().bfloat16()) for _ in range(2)))
    model[0].compile(backend="aot_eager")
    model[1].compile()
    finding = found(look(model, tokens=1024))
    assert finding.title.startswith("torch.compile has no effect: 1 of 2 compile marks")
    assert finding.evidence["idle_fp8_linears"] == 2


def test_dynamo_disabled_in_its_configuration(model: nn.Module, look: Look) -> None:
    model.compile()
    with torch._dynamo.config.patch(disable=True):
        finding = found(look(model))
        assert finding.treatment is not None
        assert finding.treatment.code == "torch._dynamo.config.disable = False"
    assert compile_without_effect(look(model)) is None


def test_stance_force_eager(model: nn.Module, look: Look) -> None:
    model.compile()
    with torch.compiler.set_stance("force_eager"):
        finding = found(look(model))
    assert "force_eager" in finding.title
    assert compile_without_effect(look(model)) is None


@pytest.mark.parametrize("compiled", [torch.compile, lambda model: model.compile() or model])
def test_torchdynamo_disable(compiled: Callable[[Any], Any], look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile(model) returns the model itself under the variable, so that there is no mark to be seen."""
    with monkeypatch.context() as patch:
        patch.setenv("TORCHDYNAMO_DISABLE", "1")
        finding = found(look(compiled(convert_to_float8_training(Model().bfloat16()))))
        assert finding.treatment is not None
        assert finding.treatment.code == "unset TORCHDYNAMO_DISABLE"
    assert compile_without_effect(look(compiled(convert_to_float8_training(Model().bfloat16())))) is None


def test_torchdynamo_disable_with_another_value_does_nothing(model: nn.Module, look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "true")
    model.compile()
    assert compile_without_effect(look(model)) is None


def failing(graph: Any, inputs: Any) -> Any:
    raise RuntimeError("this backend is broken")


@torch._dynamo.config.patch(suppress_errors=True)
def test_a_suppressed_failure(look: Look, clean_dynamo: None) -> None:
    model = Model()
    model.compile(backend=failing)
    assert compile_without_effect(look(model)) is None, "nothing failed yet"
    model(torch.ones(16, 64))
    finding = found(look(model))
    assert "compilations failed and the errors were suppressed (BackendCompilerFailed" in finding.title


@torch._dynamo.config.patch(suppress_errors=True)
def test_a_graph_break_is_no_failure(look: Look, clean_dynamo: None) -> None:
    class Breaks(Model):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(2):
                x = super().forward(x)
                torch._dynamo.graph_break()
            return x

    model = Breaks()
    model.compile(backend="aot_eager")
    model(torch.ones(16, 64))
    facts = look(model)
    assert facts.training.dynamo.frames_total > facts.training.dynamo.frames_ok
    assert "failed" not in found(facts).explanation


PROGRAM = """
import json, sys
import torch
from torch import nn
from fp8doctor.diagnose import diagnose
from fp8doctor.examine import examine
from fp8doctor.facts import Target, Workload
from fp8doctor.job import Job

model = nn.Sequential(nn.Linear(64, 64))
model.compile()
torch._dynamo.config  # loaded, as after a first step
facts = examine(Job(model=model, target=Target(kind="live", name="model", attribute=None), workload=Workload(tokens=None, accumulate=1)))
report = diagnose(facts, select=["CMP002"])
json.dump([[f.severity, f.title, f.treatment.code] for f in report.findings], sys.stdout)
"""


@pytest.mark.parametrize(
    ("variable", "value", "severity"),
    [
        ("TORCH_COMPILE_DISABLE", "1", "warning"),
        ("TORCHDYNAMO_SUPPRESS_ERRORS", "0", "info"),
        ("TORCHDYNAMO_SUPPRESS_ERRORS", "1", None),
        ("TORCH_COMPILE_DISABLE", "0", None if torch.__version__ >= (2, 8) else "warning"),
    ],
)
def test_variables_that_torch_reads_when_it_is_imported(variable: str, value: str, severity: str | None) -> None:
    environment = os.environ | {variable: value, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    findings = json.loads(done.stdout)
    if severity is None:
        assert findings == []
    else:
        assert [found[0] for found in findings] == [severity]
        assert findings[0][2] == f"unset {variable}"


def test_any_value_disabled_before_torch_2_8() -> None:
    facts = msgspec.structs.replace(
        SICK,
        software=Software(torch="2.7.1"),
        environment=msgspec.structs.replace(SICK.environment, variables={"TORCH_COMPILE_DISABLE": "0"}),
        training=msgspec.structs.replace(SICK.training, dynamo=msgspec.structs.replace(SICK.training.dynamo, disabled=True)),
    )
    assert "TORCH_COMPILE_DISABLE=0 is set, and torch 2.7.1 takes any value for a yes" in found(facts).explanation


def test_the_compiled_object_is_another(look: Look, model: nn.Module) -> None:
    finding = found(look(model, compiled_elsewhere=("compiled",)))
    assert "compiled is a compiled wrapper" in finding.title
    assert compile_without_effect(look(torch.compile(model))) is None


def test_a_file_that_compiles_under_another_name(tmp_path: Path) -> None:
    from fp8doctor.examine import examine
    from fp8doctor.load import load

    path = tmp_path / "train.py"
    path.write_text("import torch\nmodel = torch.nn.Sequential(torch.nn.Linear(64, 64))\ncompiled = torch.compile(model)\n", "utf-8")
    finding = found(examine(load(f"{path}:model")))
    assert finding.title == "torch.compile has no effect: compiled is a compiled wrapper, and the model beside it, which was examined, stays uncompiled"
    assert compile_without_effect(examine(load(f"{path}:compiled"))) is None


def test_without_marks_it_does_not_apply(look: Look, model: nn.Module) -> None:
    assert isinstance(compile_without_effect(look(model)), NotApplicable)


def test_several_causes_are_all_named() -> None:
    dynamo = Dynamo(disabled=True, suppress_errors=True, stance="force_eager", frames_total=1, frames_ok=0, failures=("BackendCompilerFailed: broken",))
    finding = found(msgspec.structs.replace(SICK, training=msgspec.structs.replace(SICK.training, dynamo=dynamo)))
    causes = finding.evidence["causes"]
    assert isinstance(causes, tuple)
    assert len(causes) == 4
    assert finding.treatment is not None
    assert len(finding.treatment.code.splitlines()) == 4
