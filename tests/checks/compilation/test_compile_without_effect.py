"""CMP002 on real marks, a real Dynamo and real variables: each cause fires, and its fix makes it silent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torchao.float8 import convert_to_float8_training

from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.facts import Facts
from fp8doctor.finding import Treatment
from tests.checks.rules import finding_of, found_by, outcome_of

pytestmark = pytest.mark.slow

Look = Callable[..., Facts]
VAIN = "compile-without-effect"


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.gelu(self.up(x)))


def float8(build: Callable[[], nn.Module] = Model) -> Any:
    return convert_to_float8_training(build().bfloat16())


def fix_of(facts: Facts) -> Treatment:
    treatment = found_by(VAIN, facts).treatment
    assert treatment is not None
    return treatment


@pytest.fixture
def clean_dynamo() -> Iterator[None]:
    """Counters and metrics of failed compilations do not reach the next test."""
    import torch._dynamo.utils as utilities

    yield
    torch._dynamo.reset()
    utilities.counters.clear()
    utilities.clear_compilation_metrics()


def in_place(module: Any) -> Any:
    module.compile(backend="eager")
    return module


def forward_of(module: Any) -> Any:
    module.forward = torch.compile(module.forward, backend="aot_eager")
    return module


@pytest.mark.parametrize(
    "mark", [in_place, forward_of, lambda module: torch.compile(module, backend="eager")]
)
def test_a_backend_without_kernels_and_the_users_line_without_it(mark: Any, look: Look) -> None:
    finding = found_by(VAIN, look(nn.Sequential(*(mark(float8()) for _ in range(2))), tokens=1024))
    assert (finding.severity, finding.evidence["idle_fp8_linears"]) == ("warning", 4)
    assert finding.saving_ms is not None
    model = nn.Sequential(float8(), float8())
    exec(finding.treatment.code, {"model": model, "torch": torch})
    facts = look(model, tokens=1024)
    assert len(facts.training.compile_marks) == 2
    assert outcome_of(VAIN, facts) == "silent"


def test_dynamo_switched_off(look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    model = float8()
    model.compile()
    assert outcome_of(VAIN, look(model)) == "silent"
    with torch.compiler.set_stance("force_eager"):
        assert fix_of(look(model)).code == 'torch.compiler.set_stance("default")'
    with torch._dynamo.config.patch(disable=True):
        assert fix_of(look(model)).code == "torch._dynamo.config.disable = False"
        monkeypatch.setenv("TORCH_COMPILE_DISABLE", "0")  # before torch 2.8 any value switches it off
        assert fix_of(look(model)).code == "unset TORCH_COMPILE_DISABLE"


@pytest.mark.parametrize("compiled", [torch.compile, lambda model: model.compile() or model])
def test_torchdynamo_disable(compiled: Any, look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile(model) returns the model itself under the variable: there is no mark to be seen."""
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    report = diagnose(look(compiled(float8()), tokens=16384))
    cause = next(each for each in report.findings if each.name == VAIN)
    assert cause.treatment.code == "unset TORCHDYNAMO_DISABLE"
    assert (cause.evidence["idle_fp8_linears"], cause.saving_ms is not None) == (2, True)
    assert "CMP001" not in {each.code for each in report.findings}
    assert outcome_of(VAIN, look(Model().bfloat16())) == "not_applicable"
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "true")  # which does nothing
    assert outcome_of(VAIN, look(compiled(float8()))) == "silent"


def failing(graph: Any, inputs: Any) -> Any:
    raise RuntimeError("this backend is broken")


class Breaks(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            torch._dynamo.graph_break()  # inside a try: the whole frame is given up
        finally:
            x = super().forward(x)
        return x


@torch._dynamo.config.patch(suppress_errors=True)
def test_a_suppressed_failure_which_a_graph_break_is_not(
    look: Look, clean_dynamo: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: nn.Module = Breaks()
    model.compile(backend=lambda graph, inputs: graph)
    model(torch.ones(16, 64))
    assert outcome_of(VAIN, look(model)) == "silent"
    model = Model()
    model.compile(backend=failing)
    model(torch.ones(16, 64))
    assert fix_of(look(model)).code == "torch._dynamo.config.suppress_errors = False"
    monkeypatch.setenv("TORCHDYNAMO_SUPPRESS_ERRORS", "1")
    assert fix_of(look(model)).code == "unset TORCHDYNAMO_SUPPRESS_ERRORS"


def test_a_compiled_object_beside_the_model(look: Look) -> None:
    assert fix_of(look(float8(), compiled_elsewhere=("compiled",))).name == "use-compiled-object"
    assert outcome_of(VAIN, look(float8())) == "not_applicable"


def layers(*places: Any) -> nn.Module:
    return nn.Sequential(*(place() if isinstance(place, type) else nn.Linear(64, 64) for place in places))


only_if_left_uncompiled = pytest.mark.skipif(
    hasattr(torch._dynamo.eval_frame.OptimizedModule, "_should_wrap_module_call_impl"),
    reason="this torch compiles them (seen in 2.14.1)",
)


@only_if_left_uncompiled
@pytest.mark.parametrize(
    "build",
    [lambda: float8(lambda: layers(1, 2)), lambda: nn.TransformerEncoderLayer(64, 4).bfloat16()],
    ids=["Sequential in FP8", "TransformerEncoderLayer in BF16"],
)
def test_in_place_on_classes_of_torch(build: Any, look: Look, clean_dynamo: None) -> None:
    model = build()
    model.compile()
    facts = look(model, tokens=1024)
    assert finding_of("eager-float8", facts) is finding_of("only-linears-compiled", facts) is None
    names: dict[str, Any] = {"model": model, "torch": torch}
    exec(fix_of(facts).code.replace("torch.compile(", "torch.compile(backend='aot_eager', model="), names)
    torch._dynamo.utils.counters.clear()
    names["model"](torch.ones(16, 1, 64, dtype=torch.bfloat16, requires_grad=True))
    assert torch._dynamo.utils.counters["frames"]["ok"] == 1
    assert fix_of(look(names["model"])).name == "default-backend", "aot_eager is all that is left"


def beside() -> nn.Module:
    """Compiled FP8 blocks, and a compiled Sequential in BF16."""
    model = nn.Module()
    model.blocks = nn.ModuleList(float8() for _ in range(2))
    model.patches = nn.Sequential(nn.Linear(64, 64).bfloat16())
    for block in (*model.blocks, model.patches):
        block.compile()
    return model


def test_what_compiles_all_that_matters(look: Look) -> None:
    assert outcome_of(VAIN, look(beside())) == "silent"
    blocks_and_a_head = float8(lambda: layers(Model, Model, 3))
    blocks_and_a_head.compile()
    assert outcome_of(VAIN, look(blocks_and_a_head)) == "silent"
