"""MOD002 on layers that note what they did, on a step that was profiled, and on layers that emulate FP8."""

from collections.abc import Callable

import pytest
import torch
from msgspec.structs import replace
from torch import nn
from torchao.float8 import convert_to_float8_training

from fp8doctor import inspect_model
from fp8doctor.facts import Arm, Facts, Trial
from fp8doctor.facts.arm_names import ArmName, Reason
from tests.checks.arms import ran, timed
from tests.checks.models import float8, mlp, mxfp8
from tests.checks.rules import finding_of, fix_of, found_by, outcome_of
from tests.stand_ins import transformer_engine as te

ENGAGED, EMULATED = "fp8-never-engaged", "emulated-fp8"


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
        ("ffffffff", None),
        ("bbffffbb", "info"),
        ("bbbfffff", "error"),
        ("fffbffff", "error"),
        ("fb", "error"),
        ("bbbbbbbb", "error"),
    ],
)
def test_layers_note_where_they_ran_and_only_ends_are_kept_in_bf16_on_purpose(
    monkeypatch: pytest.MonkeyPatch, where: str, severity: str | None
) -> None:
    """bionemo's OpenGenome2 recipe keeps the first and the last block, and its head, out of the autocast."""
    te.install(monkeypatch)
    model = nn.Sequential(*(Autocast(each == "f") for each in where))
    model(torch.ones(16, 32)).sum().backward()
    report = inspect_model(model, torch.ones(16, 32), trial=False)
    found = next((each for each in report.findings if each.code == "MOD002"), None)
    assert (found and found.severity) == severity
    assert (report.verdict.status == "fp8_not_engaged") is ("f" not in where)
    if found:
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
    batch = torch.ones(16, 32, dtype=torch.bfloat16)
    model = convert_to_float8_training(Bypassed().bfloat16())
    report = inspect_model(model, batch, device="cpu", budget_s=5)
    assert found_by(ENGAGED, report.facts).severity == "error"
    assert report.verdict.status == "fp8_not_engaged"


@pytest.mark.slow
@pytest.mark.parametrize(("counted", "fires"), [(9, False), (7, False), (6, True)])
def test_far_fewer_gemms_than_the_layers_should_run(counted: int, fires: bool) -> None:
    model = convert_to_float8_training(nn.Sequential(*(nn.Linear(32, 32) for _ in range(3))))
    facts = inspect_model(model, torch.ones(16, 32, requires_grad=True), trial=False).facts
    assert outcome_of(ENGAGED, facts) == "not_applicable", "without a trial nothing notes it"
    linears = tuple(replace(each, flops_per_token=6.0 * 32 * 32) for each in facts.linears())
    facts = replace(facts, network=replace(facts.network, linears=linears))
    finding = finding_of(ENGAGED, timed(facts, ran("as_is", fp8_gemms=counted, cuts=())))
    assert (finding and finding.severity) == ("warning" if fires else None)


@pytest.mark.parametrize(
    ("build", "treatment"),
    [
        (lambda emulate: float8(mlp(), emulate=emulate), "real-fp8-kernel"),
        (lambda emulate: mxfp8(mlp(), emulated=emulate), "real-mx-kernel"),
    ],
)
def test_emulation_is_found_and_the_real_kernel_is_the_treatment(
    look: Callable[..., Facts], build: Callable[[bool], nn.Module], treatment: str
) -> None:
    facts = look(build(True))
    assert found_by(EMULATED, facts).evidence["emulated_layers"] == 2
    assert fix_of(EMULATED, facts).name == treatment
    assert outcome_of(EMULATED, look(build(False))) == "silent"
    assert outcome_of(EMULATED, look(mlp())) == "not_applicable"
    none_ran = Trial(device="cuda", arms=(Arm(name=ArmName.AS_IS, tried=False, why=Reason.NO_FP8_GEMM),))
    assert finding_of(ENGAGED, replace(facts, trial=none_ran)) is None, "it uses no FP8 matmul"
    assert finding_of(ENGAGED, replace(look(build(False)), trial=none_ran)) is not None
