"""SHP005: the recipe read back from real torchao models, with steps as they were measured on an H200."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

from fp8doctor import load_report
from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.facts import NOT_RECORDED, Arm, Facts, Linear, Network, Observation, Trial
from tests.checks.arms import failed, ran, timed
from tests.checks.rules import finding_of, found_by, outcome_of
from tests.test_recorded import RECORDED

Look = Callable[..., Facts]
DEAR = "recipe-too-dear"

WIDTH_1024 = {"tensorwise": 88.31, "rowwise": 122.57, "rowwise-with-gw-hp": 94.21}
WIDTH_4096 = {"tensorwise": 71.55, "rowwise": 85.76, "rowwise-with-gw-hp": 83.57}


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)).bfloat16()


def converted(recipe: str) -> nn.Module:
    return convert_to_float8_training(mlp(), config=Float8LinearConfig.from_recipe_name(recipe))


def compiled(facts: Facts, own: str, steps: dict[str, float], **fields: str) -> Facts:
    others = (ran(f"recipe-{recipe}", ms, base="as_is") for recipe, ms in steps.items() if recipe != own)
    return timed(facts, ran("as_is", steps[own]), *others, **fields)


def test_rowwise_on_narrow_layers_and_its_printed_lines(look: Look) -> None:
    finding = found_by(DEAR, compiled(look(converted("rowwise"), tokens=16384), "rowwise", WIDTH_1024))
    assert (finding.severity, finding.evidence["faster_recipe"]) == ("warning", "tensorwise")
    assert finding.evidence["rowwise_with_gw_hp_step_ms"] == 94.21
    assert finding.saving_ms is not None
    assert (finding.saving_ms.basis, finding.saving_ms.middle) == ("measured", pytest.approx(122.6 - 88.3))
    model = mlp()
    assert finding.treatment is not None
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
    assert finding.treatment is not None
    assert finding.treatment.name == "te-delayed"


@pytest.mark.parametrize(
    "arms",
    [
        (ran("as_is", 100.0), ran("recipe-tensorwise", 98.0, base="as_is")),
        (ran("as_is", 100.0), ran("recipe-tensorwise", 90.0, spread_ms=15.0, base="as_is")),
        (
            ran("as_is", 366.0),
            ran("prescribed", 88.3, base="as_is"),
            ran("recipe-tensorwise", 122.6, base="prescribed"),
        ),
        (
            ran("as_is", 110.0),
            ran("compile-blocks", 140.0, base="as_is"),
            ran("recipe-tensorwise", 125.0, base="compile-blocks"),
        ),
    ],
    ids=["even", "within the spread", "what compiling saves is not the recipe's", "one graph is faster"],
)
def test_no_difference_is_claimed(look: Look, arms: tuple[Arm, ...]) -> None:
    assert outcome_of(DEAR, timed(look(converted("rowwise"), tokens=16384), *arms)) == "silent"


def test_a_recipe_that_was_timed_by_block_beats_the_one_graph_too(look: Look) -> None:
    facts = timed(
        look(converted("rowwise"), tokens=16384),
        ran("as_is", 110.0),
        ran("compile-blocks", 140.0, base="as_is"),
        ran("recipe-tensorwise", 90.0, base="compile-blocks"),
    )
    assert found_by(DEAR, facts).evidence["of_arm"] == "compile-blocks"


@pytest.mark.parametrize(
    "arms",
    [
        (ran("as_is"),),
        (ran("as_is"), failed("recipe-tensorwise", "torchao cannot be imported")),
        (failed("as_is", "it raises"), ran("recipe-tensorwise", base="as_is")),
    ],
)
def test_without_a_comparison_there_is_no_answer(look: Look, arms: tuple[Arm, ...]) -> None:
    assert outcome_of(DEAR, timed(look(converted("rowwise"), tokens=16384), *arms)) == "not_applicable"
    assert outcome_of(DEAR, timed(look(mlp(), tokens=16384), *arms)) == "not_applicable"
    on_cpu = compiled(look(converted("rowwise"), tokens=64), "rowwise", WIDTH_1024, device="cpu")
    assert outcome_of(DEAR, on_cpu) == "not_applicable"


def test_without_a_trial_a_recipe_that_is_modelled_as_much_faster_is_information() -> None:
    """35.1 and 27.2 ms are modelled, 39.3 and 29.2 were measured."""
    facts = load_report(RECORDED / "h200-rowwise_narrow.json.gz").facts
    untimed = msgspec.structs.replace(facts, trial=NOT_RECORDED)
    finding = next(each for each in diagnose(untimed).findings if each.name == DEAR)
    assert (finding.severity, finding.treatment) == ("info", None)
    assert finding.evidence["modelled_faster_step_ms"] == pytest.approx(27.2, abs=0.1)
    synthetic = msgspec.structs.replace(facts.workload, batch_source="made up")
    linears = tuple(msgspec.structs.replace(each, compiled=NOT_RECORDED) for each in facts.network.linears)
    for unknown in (
        {"observed": Observation(steps_ms=(64.4,))},
        {"workload": synthetic},
        {"network": msgspec.structs.replace(facts.network, linears=linears)},
    ):
        assert outcome_of(DEAR, msgspec.structs.replace(untimed, **unknown)) == "unknown"


@pytest.mark.parametrize(
    ("recipe", "gpu", "found"),
    [
        ("tensorwise", "RTX5090", True),
        ("rowwise", "RTX5090", True),
        ("tensorwise", "RTX4090", False),
        ("tensorwise", "B200", False),
    ],
)
def test_a_gpu_that_multiplies_block_scaled_fp8_faster(
    recipe: str, gpu: str, found: bool, look: Look
) -> None:
    finding = finding_of(DEAR, msgspec.structs.replace(look(converted(recipe)), assumed_gpu=gpu))
    assert (finding and (finding.severity, finding.evidence["own_recipe"])) == (
        ("info", (recipe,)) if found else None
    )
