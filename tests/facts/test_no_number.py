"""Why there is no number is asked of its kind, not of a sentence; a trial that lost a part keeps the rest."""

from __future__ import annotations

import pytest

from fp8doctor.facts import Arm, Trial
from fp8doctor.facts.arm_names import Reason
from fp8doctor.facts.no_number import PARTS, NoNumber, why_of, without
from fp8doctor.facts.unrecorded import NOT_RECORDED

TIMED = Arm(name="as_is", tried=True, step_ms=1.0)
SHORT = Arm(
    name="short",
    treatments=("x",),
    tried=False,
    why=Reason.OUT_OF_MEMORY,
    reason="the GPU's memory is too small for it",
)
DIED = NoNumber(Reason.TOOK_PROCESS_DOWN, "it died")

WRITTEN = {
    "no FP8 GEMM was seen in its step": Reason.NO_FP8_GEMM,
    "the profiler cannot be used here, and without it no FP8 GEMM of its can be seen": Reason.FP8_UNSEEN,
    "18 FP8 GEMMs were seen in a BF16 step": Reason.FP8_IN_BF16,
    "nothing in it was compiled": Reason.NOTHING_COMPILED,
    "it was still compiling while it was timed": Reason.STILL_COMPILING,
    "it raises RuntimeError: the batch was used up before it": Reason.RAISES,
    "the GPU's memory is too small for it": Reason.OUT_OF_MEMORY,
    "the GPU's memory is too small for it, even beside bf16 alone": Reason.OUT_OF_MEMORY,
    "the memory of the GPU is too small for even a cut of the model": Reason.OUT_OF_MEMORY,
    "the budget of 60 s was used up before it": Reason.NO_TIME_LEFT,
    "the budget of 0.5 s would not have been enough for it": Reason.NOT_EXPECTED_TO_FIT,
    "the training step raises ValueError: shapes differ": Reason.STEP_RAISES,
    "the training step raises CheckpointError: another number of tensors": Reason.RECOMPUTE_DIFFERS,
    "there is no batch to run it on; give one, as example_batch() in a model file": Reason.NO_BATCH,
    "a variant that had run before stopped the timing with RuntimeError: worn out": Reason.TIMING_RAISES,
    "torchao cannot be imported": None,
    None: None,
}
"""What fp8doctor wrote before there was a kind beside it."""


@pytest.mark.parametrize("gaps", [NOT_RECORDED, {"trial.shapes": "no time"}], ids=["none yet", "another"])
@pytest.mark.parametrize(("part", "fact"), PARTS.items())
def test_a_part_that_is_no_arm_is_a_gap(part: str, fact: str, gaps: dict[str, str]) -> None:
    kept = without(Trial(arms=(TIMED,), gaps=gaps), part, DIED)
    assert kept.arms == (TIMED,)
    assert kept.gaps == {**(gaps or {}), fact: "it died"}


def test_an_arm_that_has_no_time_keeps_what_it_is() -> None:
    first, second = without(Trial(arms=(TIMED, SHORT)), "short", DIED).arms
    assert first == TIMED
    assert (second.treatments, second.tried) == (("x",), False)
    assert (second.why, second.reason) == (Reason.TOOK_PROCESS_DOWN, "it died")


@pytest.mark.parametrize("part", ["as_is", "unknown"])
def test_an_arm_that_has_a_time_keeps_it(part: str) -> None:
    assert without(Trial(arms=(TIMED,)), part, DIED).arms == (TIMED,)


@pytest.mark.parametrize(("sentence", "why"), WRITTEN.items())
def test_a_sentence_of_before_says_what_it_said(sentence: str | None, why: Reason | None) -> None:
    assert why_of(Arm(name="x", tried=False, reason=sentence)) is why
    assert why_of(Trial(arms=(), reason=sentence)) is why
