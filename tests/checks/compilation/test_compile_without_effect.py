"""CMP002 on real marks, a real Dynamo and real variables: each cause fires, and its treatment makes it
silent."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn
from torchao.float8 import convert_to_float8_training

from fp8doctor.analysis.compile_coverage import WHY_WRAPPED
from fp8doctor.checks.compilation.compile_without_effect import FIRES, compile_without_effect, find_causes
from fp8doctor.checks.compilation.eager_float8 import eager_float8
from fp8doctor.checks.compilation.only_linears_compiled import only_linears_compiled
from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.facts import Dynamo, Facts, Software
from fp8doctor.finding import Finding, NotApplicable
from tests.checks.environment import live

pytestmark = pytest.mark.slow

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
        (compile_in_place, "{0}.compile()"),
        (
            lambda module: torch.compile(module, backend="eager"),
            "model.set_submodule(name, torch.compile({0}))",
        ),
        (compile_forward, "module = {0}\n    module.forward = torch.compile(module.forward)"),
    ],
    ids=["in place", "wrapped", "forward"],
)
def test_the_printed_line_is_the_one_of_the_user_without_its_backend(
    mark: Callable[[Any], Any], line: str, look: Look
) -> None:
    def build() -> nn.Module:
        return nn.Sequential(*(convert_to_float8_training(Model().bfloat16()) for _ in range(2)))

    finding = found(look(nn.Sequential(*(mark(block) for block in build())), tokens=1024))
    assert finding.treatment is not None
    loop = 'for name in {"0", "1"}:\n    ' + line.format("model.get_submodule(name)")
    assert finding.treatment.code == f"{loop}   # without backend='eager'"
    model = build()
    exec(finding.treatment.code, {"model": model, "torch": torch})
    assert len(look(model).training.compile_marks) == 2
    assert compile_without_effect(look(model, tokens=1024)) is None


def test_one_block_of_two_with_a_backend_without_kernels(look: Look) -> None:
    model = nn.Sequential(*(convert_to_float8_training(Model().bfloat16()) for _ in range(2)))
    model[0].compile(backend="aot_eager")
    model[1].compile()
    finding = found(look(model, tokens=1024))
    assert finding.title.startswith("torch.compile has no effect: 1 of 2 torch.compile calls")
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
def test_torchdynamo_disable(
    compiled: Callable[[Any], Any], look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch.compile(model) returns the model itself under the variable, so that there is no mark to be
    seen."""
    with monkeypatch.context() as patch:
        patch.setenv("TORCHDYNAMO_DISABLE", "1")
        finding = found(look(compiled(convert_to_float8_training(Model().bfloat16()))))
        assert finding.treatment is not None
        assert finding.treatment.code == "unset TORCHDYNAMO_DISABLE"
    assert compile_without_effect(look(compiled(convert_to_float8_training(Model().bfloat16())))) is None


def test_the_variable_is_the_cause_of_layers_that_run_uncompiled(
    look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    report = diagnose(look(torch.compile(convert_to_float8_training(Model().bfloat16())), tokens=16384))
    cause = next(each for each in report.findings if each.code == "CMP002")
    assert cause.saving_ms is not None
    assert cause.evidence["idle_fp8_linears"] == 2
    assert "CMP001" not in {each.code for each in report.findings}
    bf16 = compile_without_effect(look(torch.compile(Model().bfloat16())))
    assert isinstance(bf16, NotApplicable)
    assert bf16.reason.endswith("cannot see whether anything asks for it")


def test_torchdynamo_disable_with_another_value_does_nothing(
    model: nn.Module, look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
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
            try:
                torch._dynamo.graph_break()  # inside a try: the whole frame is given up
            finally:
                x = super().forward(x)
            return x

    model = Breaks()
    model.compile(backend="aot_eager")
    model(torch.ones(16, 64))
    facts = look(model)
    assert facts.training.dynamo.frames_total > facts.training.dynamo.frames_ok
    assert "failed" not in found(facts).explanation


PROGRAM = """
import json, os, sys
import torch
assert "torch._dynamo.config" not in sys.modules
os.environ[sys.argv[1]] = sys.argv[2]
from torch import nn
from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.examine import examine
from fp8doctor.facts import Target, Workload
from fp8doctor.loading.job import Job

class Model(nn.Sequential):
    def forward(self, x):
        return super().forward(x)

model = Model(nn.Linear(64, 64))
model.compile()
torch._dynamo.config  # loaded, as after a first step
target = Target(kind="live", name="model", attribute=None)
facts = examine(Job(model=model, target=target, workload=Workload(tokens=None, accumulate=1)))
report = diagnose(facts, select=["CMP002"])
json.dump([[f.severity, f.title, f.treatment.code] for f in report.findings], sys.stdout)
"""


@pytest.mark.gate("TORCH_COMPILE_DISABLE-1-warning")
@pytest.mark.parametrize(
    ("variable", "value", "severity"),
    [
        ("TORCH_COMPILE_DISABLE", "1", "warning"),
        ("TORCHDYNAMO_SUPPRESS_ERRORS", "0", "info"),
        ("TORCHDYNAMO_SUPPRESS_ERRORS", "1", None),
        ("TORCH_COMPILE_DISABLE", "0", None if torch.__version__ >= (2, 8) else "warning"),
    ],
)
def test_variables_that_torch_reads_when_it_is_imported(
    variable: str, value: str, severity: str | None
) -> None:
    findings = json.loads(live.printed(PROGRAM, variable, value))
    if severity is None:
        assert findings == []
    else:
        assert [found[0] for found in findings] == [severity]
        assert findings[0][2] == f"unset {variable}"


def test_any_value_disabled_before_torch_2_8() -> None:
    facts = msgspec.structs.replace(
        FIRES,
        software=Software(torch="2.7.1"),
        environment=msgspec.structs.replace(FIRES.environment, variables={"TORCH_COMPILE_DISABLE": "0"}),
        training=msgspec.structs.replace(
            FIRES.training, dynamo=msgspec.structs.replace(FIRES.training.dynamo, disabled=True)
        ),
    )
    assert (
        "TORCH_COMPILE_DISABLE=0 is set, and torch 2.7.1 reads any value as true" in found(facts).explanation
    )


def test_the_compiled_object_is_another(look: Look, model: nn.Module) -> None:
    finding = found(look(model, compiled_elsewhere=("compiled",)))
    assert "compiled is a compiled wrapper" in finding.title
    assert compile_without_effect(look(torch.compile(model))) is None


def test_a_file_that_compiles_under_another_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fp8doctor.examine import examine
    from fp8doctor.loading.model_file import load

    path = tmp_path / "train.py"
    path.write_text(
        "import torch\nmodel = torch.nn.Sequential(torch.nn.Linear(64, 64))\ncompiled = "
        "torch.compile(model)\n",
        "utf-8",
    )
    monkeypatch.setattr("sys.path", [*sys.path])
    finding = found(examine(load(f"{path}:model")))
    assert (
        finding.title == "torch.compile has no effect: compiled is a compiled wrapper, but the model that "
        "fp8doctor examined is not compiled"
    )
    assert compile_without_effect(examine(load(f"{path}:compiled"))) is None


class InSequentials(nn.Module):
    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)) for _ in range(blocks)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def blocks_in_place(model: Any) -> None:
    for block in model.blocks:
        block.compile(backend="inductor")


def layers(*places: Any) -> nn.Module:
    return nn.Sequential(*(place() if isinstance(place, type) else nn.Linear(64, 64) for place in places))


only_if_left_uncompiled = pytest.mark.skipif(
    hasattr(torch._dynamo.eval_frame.OptimizedModule, "_should_wrap_module_call_impl"),
    reason="this torch compiles them (seen in 2.14.1)",
)


@only_if_left_uncompiled
@pytest.mark.parametrize("fp8", [True, False])
@pytest.mark.parametrize(
    ("build", "mark", "code", "regions"),
    [
        (lambda: layers(1, 2), lambda model: model.compile(), "model = torch.compile(model)", 1),
        (
            InSequentials,
            blocks_in_place,
            "for i, block in enumerate(model.blocks):\n    model.blocks[i] = torch.compile(block)",
            2,
        ),
        (
            lambda: nn.TransformerEncoderLayer(64, 4),
            lambda model: model.compile(),
            "model = torch.compile(model)",
            1,
        ),
    ],
    ids=["Sequential", "Sequentials in a list", "TransformerEncoderLayer"],
)
def test_in_place_on_classes_of_torch(
    build: Callable[[], nn.Module],
    mark: Any,
    code: str,
    regions: int,
    fp8: bool,
    look: Look,
    clean_dynamo: None,
) -> None:
    model = build().bfloat16()
    if fp8:
        convert_to_float8_training(model, module_filter_fn=lambda layer, name: "self_attn" not in name)
    mark(model)
    facts = look(model, tokens=1024)
    finding = found(facts)
    assert finding.severity in (None, "warning")
    assert finding.treatment is not None
    assert finding.treatment.code == f"{WHY_WRAPPED}\n{code}"
    assert ("FP8 Linears are compiled alone" in finding.title) is fp8
    assert not isinstance(eager_float8(facts), Finding)
    assert not isinstance(only_linears_compiled(facts), Finding)
    names = {"model": model, "torch": torch}
    exec(
        finding.treatment.code.replace("(block)", "(block, backend='aot_eager')").replace(
            "(model)", "(model, backend='aot_eager')"
        ),
        names,
    )
    torch._dynamo.utils.counters.clear()
    names["model"](torch.ones(16, 1, 64, dtype=torch.bfloat16, requires_grad=True))  # type: ignore[operator]
    calls = sum(
        mark.compiles for mark in look(names["model"]).training.compile_marks if mark.form == "wrapped"
    )
    assert (calls, torch._dynamo.utils.counters["frames"]["ok"]) == (regions, 1), (
        "blocks of one class share one version"
    )
    assert not any(cause.name.startswith("compile-") for cause in find_causes(look(names["model"])))


def test_a_list_of_modules_is_never_called(look: Look) -> None:
    model = nn.Module()
    model.blocks = nn.ModuleList(convert_to_float8_training(Model().bfloat16()) for _ in range(2))
    model.blocks.compile()
    finding = found(look(model, tokens=1024))
    assert finding.evidence["idle_fp8_linears"] == 4
    assert finding.saving_ms is not None
    assert finding.treatment is not None
    assert finding.treatment.code == "for block in model.blocks:\n    block.compile()"
    exec(finding.treatment.code, {"model": model})
    assert compile_without_effect(look(model)) is None


def test_lists_that_were_wrapped_are_taken_out_of_their_wrappers(look: Look) -> None:
    """As the lines of old reports have it, and as a user may: the model cannot be called any more."""

    class OfLists(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.ModuleList([Model(), Model()]) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for first, second in self.blocks:
                x = second(first(x))
            return x

    for wrapped in ("blocks.0", "blocks.1"), ("blocks",):
        model = convert_to_float8_training(OfLists().bfloat16())
        for name in wrapped:
            model.set_submodule(name, torch.compile(model.get_submodule(name)))  # type: ignore[arg-type]
        treatment = found(look(model)).treatment
        assert treatment is not None
        assert treatment.kind == "python"
        exec(treatment.code, {"model": model})
        with torch.compiler.set_stance("force_eager"):
            model(torch.ones(16, 64, dtype=torch.bfloat16))
        assert compile_without_effect(look(model)) is None


@pytest.mark.parametrize(
    "build", [lambda: layers(Model, Model, 3), lambda: layers(Model, Model)], ids=["with a head", "blocks"]
)
def test_a_sequential_of_blocks_is_compiled_block_by_block(
    build: Callable[[], nn.Module], look: Look
) -> None:
    for model in (build(), convert_to_float8_training(build().bfloat16())):
        model.compile()
        assert compile_without_effect(look(model)) is None


def test_a_sequential_without_fp8_beside_compiled_fp8_is_no_disease(look: Look) -> None:
    model = nn.Module()
    model.blocks = nn.ModuleList(convert_to_float8_training(Model().bfloat16()) for _ in range(2))
    model.patches = nn.Sequential(nn.Linear(64, 64).bfloat16())
    for block in (*model.blocks, model.patches):
        block.compile()
    assert compile_without_effect(look(model)) is None


@only_if_left_uncompiled
def test_a_linear_that_is_compiled_as_it_was_told_needs_no_more(look: Look) -> None:
    model = nn.Sequential(nn.Linear(64, 64)).bfloat16()
    model.compile()
    names = {"model": nn.Sequential(model), "torch": torch}
    exec("model[0][0] = torch.compile(model[0][0])", names)
    assert compile_without_effect(look(names["model"])) is None


def test_a_linear_that_is_compiled_by_itself_needs_nothing(look: Look) -> None:
    model = InSequentials().bfloat16()
    for block in model.blocks:
        torch.nn.Module.compile(block[0])
    assert compile_without_effect(look(model)) is None


def test_without_marks_it_does_not_apply(look: Look, model: nn.Module) -> None:
    assert isinstance(compile_without_effect(look(model)), NotApplicable)


def test_several_causes_are_all_named() -> None:
    dynamo = Dynamo(
        disabled=True,
        suppress_errors=True,
        stance="force_eager",
        frames_total=1,
        frames_ok=0,
        failures=("BackendCompilerFailed: broken",),
    )
    finding = found(
        msgspec.structs.replace(FIRES, training=msgspec.structs.replace(FIRES.training, dynamo=dynamo))
    )
    causes = finding.evidence["causes"]
    assert isinstance(causes, tuple)
    assert len(causes) == 4
    assert finding.treatment is not None
    assert len(finding.treatment.code.splitlines()) == 4
