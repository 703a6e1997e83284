"""Why a variant or a trial has no number, and a trial that lost a part."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from fp8doctor.facts import Arm, Trial, recorded
from fp8doctor.facts.arm_names import Reason

PARTS = {"breakdown": "trial.arms.breakdown"}
"""Part that is no variant, as progress and ``skip`` call it -> the fact that is missing without it."""


class NoNumber(msgspec.Struct, frozen=True):
    """Why there is no number: a kind for code, and a sentence for people."""

    why: Reason
    sentence: str


def why_of(part: Arm | Trial) -> Reason | None:
    """Return why a variant or a trial has no number; None if it has one, or unknown.

    Recordings from before ``why`` have the sentence alone; nothing else reads one.
    """
    if recorded(part, "why"):
        return part.why
    sentence = part.get("reason") or ""
    known = (
        why for begins, ends, why in _SENTENCES if sentence.startswith(begins) and sentence.endswith(ends)
    )
    return next(known, None)


def did_not_fit(budget_s: float) -> str:
    """Write the reason of a variant that was left out for time."""
    return f"it did not fit into the budget of {budget_s:g} s"


def sentence_of(part: Arm) -> str | None:
    """Return why a variant has no number, in a sentence for people.

    Older recordings give the seconds that a variant takes. Those did not decide: time was kept for all that
    has to follow too.
    """
    sentence = part.get("reason")
    budget = re.match(r"the budget of ([\d.]+) s ", sentence or "")
    return did_not_fit(float(budget[1])) if budget else sentence


_SENTENCES = (
    ("the training step raises CheckpointError", "", Reason.RECOMPUTE_DIFFERS),
    ("the training step raises ", "", Reason.STEP_RAISES),
    ("there is no batch to run it on", "", Reason.NO_BATCH),
    ("a variant that had run before stopped the timing with ", "", Reason.TIMING_RAISES),
    ("it raises ", "", Reason.RAISES),
    ("the memory of the GPU is too small for ", "", Reason.OUT_OF_MEMORY),
    ("the GPU's memory is too small for it", "", Reason.OUT_OF_MEMORY),
    ("the budget of ", " s was used up before it", Reason.NO_TIME_LEFT),
    ("the budget of ", " s would not have been enough for it", Reason.NOT_EXPECTED_TO_FIT),
    ("no FP8 GEMM was seen in its step", "", Reason.NO_FP8_GEMM),
    ("the profiler cannot be used here, and without it no FP8 GEMM", "", Reason.FP8_UNSEEN),
    ("", " FP8 GEMMs were seen in a BF16 step", Reason.FP8_IN_BF16),
    ("nothing in it was compiled", "", Reason.NOTHING_COMPILED),
    ("it was still compiling while it was timed", "", Reason.STILL_COMPILING),
)
"""Start and end of a sentence of fp8doctor 0.1 -> its meaning."""


def without(trial: Trial, part: str, no_number: NoNumber) -> Trial:
    """Return the trial with the reason why ``part`` is missing.

    ``part`` is a variant or one of `PARTS`. A variant that has a time keeps it.
    """
    if part in PARTS:
        gaps = {**trial.get("gaps", {}), PARTS[part]: no_number.sentence}
        return msgspec.structs.replace(trial, gaps=gaps)
    arms = (
        msgspec.structs.replace(arm, why=no_number.why, reason=no_number.sentence)
        if arm.name == part and not arm.tried
        else arm
        for arm in trial.arms
    )
    return msgspec.structs.replace(trial, arms=tuple(arms))


def not_tried(no_number: NoNumber | None, **plan: Any) -> Arm:
    """Make the record of a planned variant without a number."""
    why, reason = (no_number.why, no_number.sentence) if no_number else (None, None)
    return Arm(**plan, tried=False, why=why, reason=reason, breakdown=None, memory=None, non_finite=None)
