"""STP002: a real step on the CPU beside a BF16 one that was put together, and steps in the proportions of an
H200."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

from fp8doctor import load_report
from fp8doctor.checks.step.cast_bound import cast_bound
from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.facts import Arm, Facts
from fp8doctor.facts.unrecorded import NOT_RECORDED
from fp8doctor.finding import Finding, NotApplicable
from tests.checks.arms import timed
from tests.checks.step.conftest import beside, families_of, only, with_arms
from tests.checks.step.profiled import BF16, FP8_COMPILED, FP8_EAGER, profiled, replaced, unprofiled
from tests.facts_of import DECODER_468M
from tests.patients.record import HERE

pytestmark = pytest.mark.slow

Look = Callable[..., Facts]


def in_fp8(recipe: str = "tensorwise") -> nn.Module:
    model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)).bfloat16()
    return convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name(recipe))


def test_the_casts_of_a_real_step_and_their_modules(sick: Facts) -> None:
    """FP8 GEMMs take a hundred times as long as all casts on a CPU that emulates them: here as long as the
    casts."""
    casts = families_of(sick)["cast"]
    families = families_of(sick) | {"gemm_fp8": casts}
    quick = with_arms(sick, replaced(sick.trial.arms[0], families_ms=families))
    finding = cast_bound(beside(only(quick, "gemm_fp8", "cast"), {"gemm_16bit": casts}))
    assert isinstance(finding, Finding)
    assert finding.evidence["casts_ms"] == pytest.approx(casts)
    assert finding.evidence["gemms_saved_ms"] == pytest.approx(0.0)
    dearest = finding.evidence["modules_with_most_casts"]
    assert isinstance(dearest, tuple)
    assert len(dearest) == 3
    assert set(dearest) < {"blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down"}
    assert "model.blocks[" in finding.explanation
    assert finding.treatment is not None
    assert finding.treatment.code == "for block in model.blocks:\n    block.compile()"


def test_gemms_that_pay_for_the_casts(sick: Facts) -> None:
    paid = families_of(sick)
    paid["gemm_16bit"] = paid.get("gemm_16bit", 0.0) + 2 * paid.pop("cast")
    assert cast_bound(beside(sick, paid)) is None


def test_both_numbers_of_the_uncompiled_decoder(look: Look) -> None:
    finding = cast_bound(timed(look(in_fp8(), tokens=16384), FP8_EAGER, BF16))
    assert isinstance(finding, Finding)
    assert finding.title == "FP8 casts cost 273.6 ms per step; the FP8 matmuls save only 33.0 ms"
    assert finding.explanation == (
        "The step takes 273.4 ms more than the best BF16 (92.7 ms). Casts that the matmuls do not pay for "
        "are 240.6 ms of this."
    )


def test_compiling_treats_it(look: Look) -> None:
    model = in_fp8()
    finding = cast_bound(timed(look(model, tokens=16384), FP8_EAGER, BF16))
    assert isinstance(finding, Finding)
    assert finding.treatment is not None
    scope = {"model": model}
    exec(finding.treatment.code, {"torch": __import__("torch")} | scope, scope)
    compiled = msgspec.structs.replace(FP8_COMPILED, name="as_is")
    assert cast_bound(timed(look(scope["model"], tokens=16384), compiled, BF16)) is None


def test_a_compiled_recipe_with_dear_casts(look: Look) -> None:
    model = in_fp8("rowwise")
    model.compile()
    slow = profiled(
        "as_is",
        122.6,
        arm={"graphs_run": 24},
        gemm_fp8=36.0,
        gemm_16bit=4.2,
        cast=55.0,
        attention=11.0,
        pointwise=13.0,
    )
    finding = cast_bound(timed(look(model, tokens=16384), slow, BF16))
    assert isinstance(finding, Finding)
    assert finding.treatment is not None
    assert finding.treatment.name == "recipe-tensorwise"
    model = in_fp8()
    model.compile()
    finding = cast_bound(timed(look(model, tokens=16384), slow, BF16))
    assert isinstance(finding, Finding)
    assert finding.treatment is None, "everything that is known was done"


def test_gemms_that_are_no_faster_are_said_to_be(look: Look) -> None:
    slow = profiled("as_is", 140.0, gemm_fp8=70.0, cast=30.0, attention=11.0, pointwise=13.0)
    finding = cast_bound(timed(look(in_fp8(), tokens=256), slow, BF16))
    assert isinstance(finding, Finding)
    assert finding.title == "FP8 casts cost 30.0 ms per step; the FP8 matmuls cost 7.6 ms more than in BF16"


def test_its_cause_takes_the_treatment() -> None:
    report = diagnose(timed(DECODER_468M, FP8_EAGER, BF16, FP8_COMPILED))
    assert {"CMP001", "STP002"} <= {finding.code for finding in report.findings}
    assert [step.mends for step in report.prescription] == [("CMP001",)]


@pytest.mark.parametrize(("casts_ms", "fires"), [(0.1, False), (2.7, False), (2.9, True)])
def test_casts_are_a_disease_from_three_per_cent_of_bf16(look: Look, casts_ms: float, fires: bool) -> None:
    now = profiled("as_is", 110.0, gemm_fp8=62.4, cast=casts_ms, attention=25.0, pointwise=19.0)
    assert isinstance(cast_bound(timed(look(in_fp8(), tokens=16384), now, BF16)), Finding) is fires


SILENT = {
    "FP8 is faster for another reason": (
        profiled("as_is", 85.0, gemm_fp8=60.0, cast=10.0, attention=5.0, pointwise=8.0),
        BF16,
    ),
    "FP8 pays": (msgspec.structs.replace(FP8_COMPILED, name="as_is"), BF16),
    "idle, not casts": (
        profiled("as_is", 140.0, gemm_fp8=36.0, cast=20.0, attention=11.0, pointwise=18.0),
        BF16,
    ),
}
NO_ANSWER = {
    "not profiled": (unprofiled("as_is", 366.1), BF16),
    "BF16 not profiled": (FP8_EAGER, unprofiled("bf16_compiled", 92.7)),
    "unreliable": (replaced(FP8_EAGER, reliable=False), BF16),
    "no BF16": (FP8_EAGER,),
}


@pytest.mark.parametrize("arms", SILENT.values(), ids=SILENT)
def test_it_is_silent(look: Look, arms: tuple[Arm, ...]) -> None:
    assert cast_bound(timed(look(in_fp8(), tokens=16384), *arms)) is None


@pytest.mark.parametrize("arms", NO_ANSWER.values(), ids=NO_ANSWER)
def test_there_is_no_answer(look: Look, arms: tuple[Arm, ...]) -> None:
    assert isinstance(cast_bound(timed(look(in_fp8(), tokens=16384), *arms)), NotApplicable)


def test_a_cpu_and_a_model_without_fp8_are_not_judged(look: Look) -> None:
    assert isinstance(
        cast_bound(timed(look(in_fp8(), tokens=16384), FP8_EAGER, BF16, device="cpu")), NotApplicable
    )
    assert isinstance(
        cast_bound(timed(look(nn.Sequential(nn.Linear(64, 64)), tokens=16384), FP8_EAGER, BF16)),
        NotApplicable,
    )


KNOWN_WITHOUT = {
    ("decoder_468m", "STP006"): (
        "not_applicable",
        "the trial had no time left for a fix that may explain it",
    ),
    ("llama_8b", "STP006"): ("healthy", None),
}
"""What a check answers before it asks where the time goes: FP8 is not slower, or not all was tried."""


@pytest.mark.parametrize("code", ["STP001", "STP002", "STP003", "STP004", "STP006", "STP007"])
@pytest.mark.parametrize("patient", ["decoder_468m", "accelerate_te", "llama_8b"])
def test_recordings_from_before_there_were_breakdowns_are_unknown(patient: str, code: str) -> None:
    facts = load_report(HERE / "recorded" / f"h200-{patient}.json.gz").facts
    arms = tuple(msgspec.structs.replace(each, breakdown=NOT_RECORDED) for each in facts.trial.arms)
    before = msgspec.structs.replace(facts, trial=msgspec.structs.replace(facts.trial, arms=arms, gaps={}))
    outcome = next(each for each in diagnose(before).outcomes if each.code == code)
    unknown = ("unknown", "trial.arms.breakdown was not recorded")
    assert (outcome.outcome, outcome.reason) == KNOWN_WITHOUT.get((patient, code), unknown)
