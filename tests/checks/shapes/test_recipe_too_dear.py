"""SHP005: the recipe read back from real torchao models, steps as they were measured on an H200 and on a
CPU."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
import torch
import torchao.float8
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

from fp8doctor import load_report
from fp8doctor.checks.shapes.recipe_too_dear import recipe_too_dear
from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.facts import NOT_RECORDED, Arm, Facts, Linear, Network, Observation, Trial
from fp8doctor.facts.unrecorded import Unrecorded
from fp8doctor.finding import Finding, NotApplicable, Treatment
from tests.checks.arms import failed, ran, timed
from tests.checks.environment.live import finding_of
from tests.checks.trials import tried
from tests.stand_ins.scaled_mm import needs_rowwise_scaled_mm
from tests.test_recorded import RECORDED

Look = Callable[..., Facts]

WIDTH_1024 = {"tensorwise": 88.31, "rowwise": 122.57, "rowwise-with-gw-hp": 94.21}
WIDTH_4096 = {"tensorwise": 71.55, "rowwise": 85.76, "rowwise-with-gw-hp": 83.57}


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)).bfloat16()


def converted(recipe: str) -> nn.Module:
    return convert_to_float8_training(mlp(), config=Float8LinearConfig.from_recipe_name(recipe))


def compiled(facts: Facts, own: str, steps: dict[str, float], **fields: str) -> Facts:
    others = (ran(f"recipe-{recipe}", ms, base="as_is") for recipe, ms in steps.items() if recipe != own)
    return timed(facts, ran("as_is", steps[own]), *others, **fields)


def test_without_a_trial_a_recipe_that_is_modelled_as_much_faster_is_told() -> None:
    """35.1 and 27.2 ms are modelled, 39.3 and 29.2 were measured."""
    timed_before = load_report(RECORDED / "h200-rowwise_narrow.json.gz").facts
    report = diagnose(msgspec.structs.replace(timed_before, trial=NOT_RECORDED))
    finding = next(each for each in report.findings if each.code == "SHP005")
    assert (finding.severity, finding.treatment) == ("info", None)
    assert finding.title == "The recipe tensorwise may be about 1.29x as fast as rowwise"
    workload = msgspec.structs.replace(report.facts.workload, batch_source="made up")
    made_up = diagnose(msgspec.structs.replace(report.facts, workload=workload))
    assert "SHP005" not in {each.code for each in made_up.findings}


def test_without_a_trial_nothing_is_modelled_beside_steps_that_were_watched() -> None:
    timed_before = load_report(RECORDED / "h200-rowwise_narrow.json.gz").facts
    watched = Observation(steps_ms=(64.4,))
    with pytest.raises(Unrecorded, match="trial"):
        recipe_too_dear(msgspec.structs.replace(timed_before, trial=NOT_RECORDED, observed=watched))


def test_without_a_trial_the_trial_is_missed_where_nothing_can_be_modelled() -> None:
    facts = load_report(RECORDED / "h200-rowwise_narrow.json.gz").facts
    linears = tuple(msgspec.structs.replace(each, compiled=NOT_RECORDED) for each in facts.network.linears)
    network = msgspec.structs.replace(facts.network, linears=linears)
    with pytest.raises(Unrecorded, match="trial"):
        recipe_too_dear(msgspec.structs.replace(facts, trial=NOT_RECORDED, network=network))


def test_rowwise_on_narrow_layers(look: Look) -> None:
    finding = recipe_too_dear(compiled(look(converted("rowwise"), tokens=16384), "rowwise", WIDTH_1024))
    assert isinstance(finding, Finding)
    assert finding.title == "The recipe tensorwise is 1.39x as fast as rowwise"
    assert finding.saving_ms is not None
    assert (finding.saving_ms.basis, finding.saving_ms.middle) == ("measured", pytest.approx(122.6 - 88.3))
    assert finding.evidence["rowwise_with_gw_hp_step_ms"] == 94.21


def test_the_printed_treatment_makes_it_silent(look: Look) -> None:
    finding = recipe_too_dear(compiled(look(converted("rowwise"), tokens=16384), "rowwise", WIDTH_1024))
    assert isinstance(finding, Finding)
    assert finding.treatment is not None
    assert finding.treatment.name == "recipe-tensorwise"
    model = mlp()
    exec(finding.treatment.code, vars(torchao.float8) | {"model": model})
    facts = look(model, tokens=16384)
    assert {linear.recipe for linear in facts.network.linears} == {"tensorwise"}
    assert recipe_too_dear(compiled(facts, "tensorwise", WIDTH_1024)) is None


def test_names_of_torchao_come_back_from_names_of_arms(look: Look) -> None:
    steps = {"tensorwise": 100.0, "rowwise-with-gw-hp": 90.0}
    finding = recipe_too_dear(compiled(look(converted("tensorwise"), tokens=16384), "tensorwise", steps))
    assert isinstance(finding, Finding)
    assert finding.treatment is not None
    assert finding.treatment.name == "recipe-rowwise-with-gw-hp"
    exec(finding.treatment.code, vars(torchao.float8) | {"model": mlp()})


def test_transformer_engines_recipes_are_compared_too() -> None:
    layer = Linear(name="up", stack="transformer_engine", use="training", recipe="current")
    arms = (
        ran("as_is", 100.0),
        ran("te-delayed", 94.0, base="as_is"),
        ran("te-block", 112.0, base="as_is"),
        failed("te-mxfp8", "Device compute capability 10.0 or higher required for MXFP8 execution."),
    )
    finding = recipe_too_dear(
        Facts(network=Network(linears=(layer,)), trial=Trial(device="cuda", gpu="NVIDIA H200", arms=arms))
    )
    assert isinstance(finding, Finding)
    assert finding.title == "The recipe delayed is 1.06x as fast as current"
    assert finding.evidence["blockwise_step_ms"] == 112.0
    assert finding.treatment is not None
    assert finding.treatment.name == "te-delayed"
    assert "te.autocast(enabled=True, recipe=DelayedScaling())" in finding.treatment.code


def test_tensorwise_on_wide_layers(look: Look) -> None:
    assert (
        recipe_too_dear(compiled(look(converted("tensorwise"), tokens=8192), "tensorwise", WIDTH_4096))
        is None
    )


def test_what_a_recipe_changes_is_its_base(look: Look) -> None:
    """On an eager job the recipes are timed on top of the prescription: what compiling saves is not
    theirs."""
    arms = (
        ran("as_is", 366.0),
        ran("prescribed", 88.3, base="as_is"),
        ran("recipe-rowwise", 122.6, base="prescribed"),
    )
    assert recipe_too_dear(timed(look(converted("tensorwise"), tokens=16384), *arms)) is None


@pytest.mark.parametrize(
    ("ms", "spread_ms"), [(98.0, 0.0), (90.0, 15.0)], ids=["within what is called even", "within the spread"]
)
def test_no_difference_is_claimed(look: Look, ms: float, spread_ms: float) -> None:
    arms = ran("as_is", 100.0), ran("recipe-tensorwise", ms, spread_ms=spread_ms, base="as_is")
    assert recipe_too_dear(timed(look(converted("rowwise"), tokens=16384), *arms)) is None


def test_a_cpu_says_nothing_about_a_gpu(look: Look) -> None:
    facts = compiled(look(converted("rowwise"), tokens=64), "rowwise", WIDTH_1024, device="cpu")
    assert recipe_too_dear(facts) == NotApplicable(reason="the trial timed no other recipe on a GPU")
    assert not any("recipe-" in step.treatment.name for step in diagnose(facts).prescription)


@pytest.mark.parametrize(
    ("arms", "reason"),
    [
        ((ran("as_is"),), "no other recipe was timed"),
        (
            (ran("as_is"), failed("recipe-tensorwise", "torchao cannot be imported")),
            "no other recipe was timed: torchao cannot be imported",
        ),
        ((failed("as_is", "it raises"), ran("recipe-tensorwise", base="as_is")), "no other recipe was timed"),
    ],
)
def test_without_a_comparison_there_is_no_answer(look: Look, arms: tuple[Arm, ...], reason: str) -> None:
    assert recipe_too_dear(timed(look(converted("rowwise"), tokens=16384), *arms)) == NotApplicable(
        reason=reason
    )


def test_bf16_has_no_recipe(look: Look) -> None:
    assert isinstance(recipe_too_dear(timed(look(mlp(), tokens=16384), ran("as_is"))), NotApplicable)


@needs_rowwise_scaled_mm
@pytest.mark.slow
def test_the_trial_tries_what_the_check_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real arms, eager on a CPU, whose times are given a GPU's name: whichever is faster, each is compared
    with the step as it is."""
    names = [f"recipe-{name}" for name in ("tensorwise", "rowwise-with-gw-hp")]
    layer = convert_to_float8_training(
        nn.Sequential(nn.Linear(16, 16)).bfloat16(), config=Float8LinearConfig.from_recipe_name("rowwise")
    )
    facts = tried(
        layer,
        torch.ones(16, 16, dtype=torch.bfloat16),
        "as_is",
        more=lambda of, as_is: [
            of.on(as_is, [Treatment(name=name, summary="", code="")], name) for name in names
        ],
    )
    assert {
        arm.name: (arm.tried, arm.reason) for arm in facts.trial.arms if arm.name in names
    } == dict.fromkeys(names, (True, None))
    there = msgspec.structs.replace(facts.trial, device="cuda", gpu="NVIDIA H200")
    answer = recipe_too_dear(msgspec.structs.replace(facts, trial=there))
    assert not isinstance(answer, NotApplicable)
    if answer is not None:
        assert answer.evidence["own_recipe"] == ("rowwise",)


@pytest.mark.parametrize(
    ("recipe", "gpu", "told"),
    [
        ("tensorwise", "RTX5090", True),
        ("rowwise", "RTX5090", True),
        ("tensorwise", "RTX4090", False),
        ("tensorwise", "B200", False),
    ],
)
def test_a_gpu_that_multiplies_block_scaled_fp8_faster(recipe: str, gpu: str, told: bool, look: Look) -> None:
    facts = msgspec.structs.replace(look(converted(recipe)), assumed_gpu=gpu)
    finding = finding_of("SHP005", facts)
    assert (finding is not None) is told
    if finding is not None:
        assert (finding.severity, finding.evidence["own_recipe"]) == ("info", (recipe,))
        assert "nothing was timed" in finding.explanation


@pytest.mark.parametrize(("recipe_ms", "found"), [(90.0, True), (125.0, False)])
def test_a_recipe_that_was_timed_by_block_has_to_beat_the_one_graph(
    look: Look, recipe_ms: float, found: bool
) -> None:
    facts = timed(
        look(converted("rowwise"), tokens=16384),
        ran("as_is", 110.0),
        ran("compile-blocks", 140.0, base="as_is"),
        ran("recipe-tensorwise", recipe_ms, base="compile-blocks"),
    )
    finding = recipe_too_dear(facts)
    assert (finding is not None) is found
    if isinstance(finding, Finding):
        assert finding.explanation.startswith(
            "Timed in turn, the step takes 90.0 instead of 140.0 ms, both compiled block by block. "
        )
        assert finding.evidence["of_arm"] == "compile-blocks"
