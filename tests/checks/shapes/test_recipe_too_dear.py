"""SHP005: the recipe read back from real torchao models, with steps as they were measured on an H200."""

import pytest
import torch
from msgspec.structs import replace
from torch import nn

from fp8doctor.analysis.arms import ratio
from fp8doctor.analysis.trial_view import TrialView
from fp8doctor.cost.step_cost import with_linears_compiled
from fp8doctor.facts import NOT_RECORDED, Arm, Facts, Linear, Network, Trial, recorded
from tests.checks.arms import failed, ran, timed
from tests.checks.models import float8, mlp
from tests.checks.rules import Look, finding_of, found_by, outcome_of
from tests.looked import looked
from tests.replays import ALL, replayed

DEAR = "recipe-too-dear"

WIDTH_1024 = {"tensorwise": 88.31, "rowwise": 122.57, "rowwise-with-gw-hp": 94.21}
WIDTH_4096 = {"tensorwise": 71.55, "rowwise": 85.76, "rowwise-with-gw-hp": 83.57}


@pytest.fixture
def rowwise(look: Look) -> Facts:
    return look(float8(mlp(), "rowwise"), tokens=16384)


def compiled(facts: Facts, own: str, steps: dict[str, float], **fields: str) -> Facts:
    others = (ran(f"recipe-{recipe}", ms, base="as_is") for recipe, ms in steps.items() if recipe != own)
    return timed(facts, ran("as_is", steps[own]), *others, **fields)


def test_rowwise_on_narrow_layers_and_its_printed_lines(rowwise: Facts, look: Look) -> None:
    finding = found_by(DEAR, compiled(rowwise, "rowwise", WIDTH_1024))
    assert (finding.severity, finding.evidence["faster_recipe"]) == ("warning", "tensorwise")
    assert finding.evidence["rowwise_with_gw_hp_step_ms"] == 94.21
    assert (finding.saving_ms.basis, finding.saving_ms.middle) == ("measured", pytest.approx(122.6 - 88.3))
    model = mlp()
    exec(finding.treatment.code, {"model": model})
    facts = look(model, tokens=16384)
    assert {linear.recipe for linear in facts.network.linears} == {"tensorwise"}
    assert outcome_of(DEAR, compiled(facts, "tensorwise", WIDTH_1024)) == "silent"
    assert outcome_of(DEAR, compiled(facts, "tensorwise", WIDTH_4096)) == "silent"


def test_recipes_of_transformer_engine_are_compared_too() -> None:
    layer = Linear(name="up", stack="transformer_engine", use="training", recipe="current")
    arms = (
        ran("as_is", 100.0),
        ran("te-delayed", 94.0, base="as_is"),
        ran("te-block", 112.0, base="as_is"),
        failed("te-mxfp8", "Device compute capability 10.0 or higher required for MXFP8 execution."),
    )
    trial = Trial(device="cuda", gpu="NVIDIA H200", arms=arms)
    finding = found_by(DEAR, Facts(network=Network(linears=(layer,)), trial=trial))
    assert (finding.evidence["faster_recipe"], finding.evidence["blockwise_step_ms"]) == ("delayed", 112.0)
    assert finding.treatment.name == "te-delayed"


def after(base: str, base_ms: float, tensorwise_ms: float) -> tuple[Arm, Arm]:
    return ran(base, base_ms, base="as_is"), ran("recipe-tensorwise", tensorwise_ms, base=base)


@pytest.mark.parametrize(
    ("arms", "outcome"),
    [
        ((ran("as_is", 100.0), ran("recipe-tensorwise", 98.0, base="as_is")), "silent"),
        ((ran("as_is"), ran("recipe-tensorwise", 90.0, spread_ms=15.0, base="as_is")), "silent"),
        ((ran("as_is", 366.0), *after("prescribed", 88.3, 122.6)), "silent"),
        ((ran("as_is", 110.0), *after("compile-blocks", 140.0, 125.0)), "silent"),
        ((ran("as_is"),), "not_applicable"),
        ((failed("as_is", "it raises"), ran("recipe-tensorwise", base="as_is")), "not_applicable"),
    ],
    ids=[
        *("even", "within the spread", "what compiling saves is not the recipe's", "one graph is faster"),
        *("no other recipe", "no time of its own"),
    ],
)
def test_no_difference_is_claimed(rowwise: Facts, arms: tuple[Arm, ...], outcome: str) -> None:
    assert outcome_of(DEAR, timed(rowwise, *arms)) == outcome


def test_a_cpu_and_a_gpu_that_multiplies_block_scaled_fp8_faster(rowwise: Facts) -> None:
    assert outcome_of(DEAR, compiled(rowwise, "rowwise", WIDTH_1024, device="cpu")) == "not_applicable"
    assert found_by(DEAR, replace(rowwise, assumed_gpu="RTX5090")).severity == "info"
    assert finding_of(DEAR, replace(rowwise, assumed_gpu="B200")) is None


def test_recipes_are_estimated_as_they_are_once_compiled() -> None:
    """Not compiled, the host sets the pace of every recipe, and none is faster."""
    with torch.device("meta"):
        model = float8(nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(8))), "rowwise")
        batch = torch.ones(16384, 2048, dtype=torch.bfloat16)
        eager = looked(model.bfloat16(), batch, assume_gpu="H100").facts
    found = found_by(DEAR, eager)
    assert found.evidence == found_by(DEAR, with_linears_compiled(eager, yes=True)).evidence
    assert found.evidence["faster_recipe"] == "tensorwise"


def test_an_estimated_recipe_was_faster_where_it_was_timed() -> None:
    """Of each recording with its trial taken away, next to what the trial measured."""
    gains = []
    for facts in (replayed(path).report.facts for path in ALL):
        if not recorded(facts, "trial.arms") or not facts.get("network.linears"):
            continue
        found = finding_of(DEAR, replace(facts, trial=NOT_RECORDED))
        view = TrialView(facts)
        best = view.timed.get(found.treatment.name) if found and found.treatment else None
        if best and (base := view.base_of(best)):
            gains.append(ratio(base.arm, best.arm).value)
    assert len(gains) >= 2
    assert min(gains) > 1
