"""MOD002 on layers that note what they did, and on a step that was profiled."""

from __future__ import annotations

import msgspec
import pytest
import torch
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

from fp8doctor import inspect_model
from fp8doctor.checks.engagement.fp8_never_engaged import fp8_never_engaged
from fp8doctor.facts import Arm, Trial
from fp8doctor.facts.arm_names import ArmName, Reason
from fp8doctor.finding import Finding, NotApplicable
from fp8doctor.report import Report
from tests.checks.arms import ran, timed
from tests.stand_ins import transformer_engine as te


def outcome(report: Report) -> str:
    return next(each.outcome for each in report.outcomes if each.code == "MOD002")


@pytest.mark.slow
@pytest.mark.parametrize("inside", [True, False], ids=["inside the autocast", "outside"])
def test_transformer_engine_layers_note_whether_they_ran_in_fp8(
    monkeypatch: pytest.MonkeyPatch, inside: bool
) -> None:
    te.install(monkeypatch)
    model = nn.Sequential(te.Linear(32, 32), te.Linear(32, 32))
    with te.autocast(enabled=inside, recipe=te.Float8CurrentScaling()):
        model(torch.ones(16, 32)).sum().backward()
    report = inspect_model(model, torch.ones(16, 32), trial=False)
    assert outcome(report) == ("healthy" if inside else "sick")
    if not inside:
        finding = next(each for each in report.findings if each.code == "MOD002")
        assert finding.title == (
            "2 of 2 FP8 layers ran their last training forward in BF16: 0 (32 x 32) and 1 (32 x 32)"
        )
        assert report.verdict.status == "fp8_not_engaged"


class Autocast(nn.Module):
    """A layer that opens the autocast itself, or closes it."""

    def __init__(self, enabled: bool) -> None:
        super().__init__()
        self.layer, self.enabled = te.Linear(32, 32), enabled

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with te.autocast(enabled=self.enabled, recipe=te.Float8BlockScaling()):
            return self.layer(x)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "severity"),
    [
        ("bfffffff", "info"),
        ("bffffffb", "info"),
        ("bbffffbb", "info"),
        ("bbbfffff", "error"),
        ("fffbffff", "error"),
        ("bffbfffb", "error"),
        ("fb", "error"),
        ("bbbbbbbb", "error"),
    ],
)
def test_first_and_last_layers_are_kept_in_bf16_on_purpose(
    monkeypatch: pytest.MonkeyPatch, where: str, severity: str
) -> None:
    """bionemo's OpenGenome2 recipe keeps the first and the last block, and its head, out of the autocast."""
    te.install(monkeypatch)
    model = nn.Sequential(*(Autocast(each == "f") for each in where))
    model(torch.ones(16, 32)).sum().backward()
    report = inspect_model(model, torch.ones(16, 32), trial=False)
    found = next(each for each in report.findings if each.code == "MOD002")
    assert found.severity == severity
    assert found.evidence["idle_layers"] == where.count("b")
    assert (found.treatment is None) is (severity == "info")


class Bypassed(nn.Module):
    """Reads the weight of a converted layer, as fused kernels do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.linear.weight)


@pytest.mark.slow
def test_converted_layers_that_are_never_called_are_seen_by_the_trial() -> None:
    model = convert_to_float8_training(Bypassed().bfloat16())
    report = inspect_model(model, torch.ones(16, 32, dtype=torch.bfloat16), device="cpu", budget_s=5)
    assert outcome(report) == "sick"
    assert report.verdict.status == "fp8_not_engaged"
    called = convert_to_float8_training(nn.Sequential(nn.Linear(32, 32, bias=False)).bfloat16())
    assert (
        outcome(inspect_model(called, torch.ones(16, 32, dtype=torch.bfloat16), device="cpu", budget_s=5))
        == "healthy"
    )


@pytest.mark.slow
def test_without_a_trial_layers_that_note_nothing_are_not_judged() -> None:
    model = convert_to_float8_training(nn.Sequential(nn.Linear(32, 32)))
    assert outcome(inspect_model(model, torch.ones(16, 32), trial=False)) == "not_applicable"


@pytest.mark.slow
@pytest.mark.parametrize(("counted", "sick"), [(9, False), (7, False), (6, True)])
def test_far_fewer_gemms_than_the_layers_should_run(counted: int, sick: bool) -> None:
    model = convert_to_float8_training(nn.Sequential(*(nn.Linear(32, 32) for _ in range(3))))
    facts = inspect_model(model, torch.ones(16, 32, requires_grad=True), trial=False).facts
    linears = tuple(msgspec.structs.replace(each, flops_per_token=6.0 * 32 * 32) for each in facts.linears())
    facts = msgspec.structs.replace(facts, network=msgspec.structs.replace(facts.network, linears=linears))
    finding = fp8_never_engaged(timed(facts, ran("as_is", fp8_gemms=counted, cuts=())))
    assert isinstance(finding, Finding) is sick
    if isinstance(finding, Finding):
        assert finding.title == "Only 6 FP8 matmuls ran in a training step; 3 FP8 layers should run 9"
        assert finding.severity == "warning"


@pytest.mark.parametrize("emulate", [True, False])
def test_layers_that_emulate_fp8_are_no_layers_that_are_never_called(emulate: bool) -> None:
    model = nn.Sequential(nn.Linear(32, 32))
    convert_to_float8_training(model, config=Float8LinearConfig(emulate=emulate))
    facts = inspect_model(model, torch.ones(16, 32), trial=False).facts
    none_ran = Arm(name=ArmName.AS_IS, tried=False, why=Reason.NO_FP8_GEMM)
    found = fp8_never_engaged(msgspec.structs.replace(facts, trial=Trial(device="cuda", arms=(none_ran,))))
    assert isinstance(found, NotApplicable if emulate else Finding)
