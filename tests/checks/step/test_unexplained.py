"""STP006: a real step beside BF16 steps that were put together, so that their difference has known parts."""

from __future__ import annotations

import re

import msgspec
import pytest

from fp8doctor.checks.step.unexplained import unexplained
from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.facts import Arm, Facts
from fp8doctor.facts.arm_names import Reason
from fp8doctor.finding import Finding, NotApplicable
from tests.checks.arms import timed
from tests.checks.step.conftest import beside, families_of, only
from tests.checks.step.profiled import BF16, COMPILED, FP8_COMPILED, FP8_EAGER, profiled, replaced, unprofiled
from tests.facts_of import DECODER_468M

pytestmark = pytest.mark.slow

SLOW_ATTENTION = profiled(
    "as_is", 120.0, gemm_fp8=36.3, cast=20.0, attention=41.0, optimizer=2.5, pointwise=12.0, loss=3.0
)
OTHERWISE = {"base": "as_is", "treatments": ("recipe-rowwise",)}


def test_a_real_step_that_is_slower_everywhere_but_in_its_casts(sick: Facts) -> None:
    families = families_of(sick)
    finding = unexplained(
        beside(sick, {family: ms if family == "cast" else ms / 2 for family, ms in families.items()})
    )
    assert isinstance(finding, Finding)
    assert finding.evidence["explained_ms"] == pytest.approx(0.0)
    parts = dict(zip(finding.evidence["parts"], finding.evidence["parts_ms"], strict=True))  # type: ignore[arg-type]
    assert sum(parts.values()) == pytest.approx(finding.evidence["difference_ms"])
    assert parts["optimizer"] == pytest.approx(families["optimizer"] / 2)
    told = r"No check knows the cause of ([\d.]+) of the \1 ms that FP8 is slower.*"
    assert re.fullmatch(told, finding.title)


def test_a_real_step_that_is_slower_by_its_casts_is_explained(sick: Facts) -> None:
    sick = only(sick, "gemm_fp8", "cast")
    assert unexplained(beside(sick, {"gemm_16bit": families_of(sick)["gemm_fp8"]})) is None


def test_the_waterfall_is_shown() -> None:
    report = diagnose(timed(DECODER_468M, SLOW_ATTENTION, BF16))
    finding = next(each for each in report.findings if each.code == "STP006")
    assert finding.severity == "warning"
    assert finding.title == (
        "No check knows the cause of 27.3 of the 27.3 ms that FP8 is slower; most of it is attention, "
        "+29.9 ms"
    )
    assert finding.explanation == (
        "Against the best BF16 (92.7 ms): attention +29.9, matmuls −26.1, casts +20.0, idle GPU +3.9, "
        "norms and pointwise −0.4 ms."
    )
    assert finding.treatment is not None
    assert "--trace" in finding.treatment.code


def test_transformer_engine_that_waits_for_the_host_is_explained() -> None:
    waiting = profiled(
        "as_is", 120.0, host_wait_pct=90.0, gemm_fp8=36.3, cast=20.0, attention=11.1, pointwise=12.4
    )
    assert unexplained(timed(DECODER_468M, waiting, BF16)) is None
    idle = replaced(waiting, host_wait_pct=5.0)
    assert isinstance(unexplained(timed(DECODER_468M, idle, BF16)), Finding), "idle, and not for the host"


def test_what_the_changes_gave_back_counts() -> None:
    assert unexplained(timed(DECODER_468M, FP8_EAGER, BF16, FP8_COMPILED)) is None
    assert (
        unexplained(timed(DECODER_468M, FP8_EAGER, BF16, unprofiled("prescribed", 88.3, **COMPILED))) is None
    ), "whatever their steps are made of"
    little = profiled(
        "prescribed",
        112.0,
        arm=OTHERWISE,
        gemm_fp8=36.3,
        cast=20.0,
        attention=36.0,
        pointwise=12.0,
        optimizer=2.5,
    )
    finding = unexplained(timed(DECODER_468M, SLOW_ATTENTION, BF16, little))
    assert isinstance(finding, Finding)
    assert (finding.evidence["of_arm"], finding.evidence["given_back_by_changes_ms"]) == (
        "prescribed",
        pytest.approx(8.0),
    )
    assert finding.explanation.startswith(
        "The timed fixes give 8.0 ms back. With them, against the best BF16"
    )


NOT_SLOWER = {
    "faster": msgspec.structs.replace(FP8_COMPILED, name="as_is"),
    "within 3%": profiled("as_is", 95.0, gemm_fp8=36.3, attention=41.0),
}
NO_ANSWER: dict[str, tuple[Arm, ...]] = {
    "not profiled": (unprofiled("as_is", 120.0), BF16),
    "the better total was not profiled": (SLOW_ATTENTION, BF16, unprofiled("prescribed", 112.0, **COMPILED)),
    "no BF16": (SLOW_ATTENTION,),
    "a change waits": (
        SLOW_ATTENTION,
        BF16,
        Arm(
            name="prescribed",
            treatments=("x",),
            tried=False,
            why=Reason.NO_TIME_LEFT,
            reason="no time",
            breakdown=None,
        ),
    ),
}


@pytest.mark.parametrize("arm", NOT_SLOWER.values(), ids=NOT_SLOWER)
def test_there_is_nothing_to_explain(arm: Arm) -> None:
    assert unexplained(timed(DECODER_468M, arm, BF16)) is None


@pytest.mark.parametrize("arms", NO_ANSWER.values(), ids=NO_ANSWER)
def test_there_is_no_answer(arms: tuple[Arm, ...]) -> None:
    assert isinstance(unexplained(timed(DECODER_468M, *arms)), NotApplicable)


def test_a_cpu_is_not_judged() -> None:
    assert isinstance(unexplained(timed(DECODER_468M, SLOW_ATTENTION, BF16, device="cpu")), NotApplicable)


BY_NORMS = profiled(
    "as_is", 120.0, gemm_fp8=36.3, cast=20.0, attention=11.1, optimizer=2.5, pointwise=37.0, loss=3.0
)
COMPILED_LAYERS = tuple(
    msgspec.structs.replace(each, compiled="blocks.0") for each in DECODER_468M.network.linears
)


def test_what_compiling_gives_bf16_accounts_for_norms_that_are_not_fused() -> None:
    """As Transformer Engine through Accelerate on an H200: 38.7 ms, BF16 39.3 eager and 30.0 compiled."""
    assert unexplained(timed(DECODER_468M, BY_NORMS, BF16, unprofiled("bf16", 125.0))) is None
    compiled = msgspec.structs.replace(
        DECODER_468M, network=msgspec.structs.replace(DECODER_468M.network, linears=COMPILED_LAYERS)
    )
    prescribed = msgspec.structs.replace(BY_NORMS, name="prescribed", **COMPILED)
    still = {
        "BF16 gains little": timed(DECODER_468M, BY_NORMS, BF16, unprofiled("bf16", 95.0)),
        "eager BF16 was not timed": timed(DECODER_468M, BY_NORMS, BF16),
        "BF16 is best eager": timed(DECODER_468M, BY_NORMS, msgspec.structs.replace(BF16, name="bf16")),
        "FP8 is compiled": timed(compiled, BY_NORMS, BF16, unprofiled("bf16", 125.0)),
        "FP8 as prescribed is compiled": timed(
            DECODER_468M, unprofiled("as_is", 121.0), BF16, unprofiled("bf16", 125.0), prescribed
        ),
    }
    found = {why: unexplained(facts) for why, facts in still.items()}
    assert {why: isinstance(each, Finding) for why, each in found.items()} == dict.fromkeys(still, True)


def test_compiling_accounts_for_no_more_than_it_gave_bf16_and_for_norms_only() -> None:
    finding = unexplained(timed(DECODER_468M, SLOW_ATTENTION, BF16, unprofiled("bf16", 125.0)))
    assert isinstance(finding, Finding)
    assert finding.evidence["fused_in_bf16_only_ms"] == 0.0
    finding = unexplained(timed(DECODER_468M, BY_NORMS, BF16, unprofiled("bf16", 95.0)))
    assert isinstance(finding, Finding)
    assert finding.evidence["fused_in_bf16_only_ms"] == pytest.approx(95.0 - 92.7)
