"""The answer of a report in four short lines: what, why, what to do, and how far it can go."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from fp8doctor.analysis.outcome import ceiling
from fp8doctor.diagnosis.answer import Verdict
from fp8doctor.diagnosis.document import Document
from fp8doctor.facts import if_recorded
from fp8doctor.render.screen import saving_in_words

Tone = Literal["bad", "good", "plain"]

WHAT: dict[str, tuple[Tone, str]] = {
    "step_raises": ("bad", "The training step raises"),
    "layers_do_not_learn": ("bad", "Layers do not learn"),
    "fp8_not_engaged": ("bad", "FP8 does not run"),
    "fp8_slower": ("bad", "FP8 is slower than BF16"),
    "fp8_even": ("plain", "FP8 is about as fast as BF16"),
    "fp8_faster": ("good", "FP8 is faster than BF16"),
    "too_noisy": ("plain", "The timing is too noisy to tell"),
    "no_fp8": ("plain", "No FP8 training here"),
    "not_measured": ("plain", "FP8's speed was not measured"),
}
"""Status of the verdict -> how it looks, and what it says."""


class Answer(Struct, frozen=True):
    """The answer; what is not known is empty."""

    tone: Tone
    what: str
    numbers: str
    why: tuple[str, ...]
    fix: tuple[str, ...]
    limit: str


def answer(report: Document) -> Answer:
    """Write the answer of a report; the whole of it is in the summary of the verdict."""
    verdict = report.verdict
    tone, what = WHAT.get(verdict.status, ("plain", verdict.status.replace("_", " ")))
    most = if_recorded(ceiling, report.facts)
    steps = report.prescription
    grave = [each.title for each in report.findings if each.severity in ("warning", "error")]
    return Answer(
        tone=tone,
        what=_how_much(verdict, what),
        numbers=_numbers(verdict),
        why=tuple(each.title for each in steps if each.code) or tuple(grave[:1]),
        fix=tuple(
            f"{each.treatment.summary}{f' ({saving})' if (saving := saving_in_words(each.saving_ms)) else ''}"
            for each in steps
        ),
        limit=f"FP8 can make this step at most {most.speedup:.2f}× as fast as BF16 on this GPU, {most.basis}."
        if most
        else "",
    )


def _how_much(verdict: Verdict, what: str) -> str:
    """Say how many times slower or faster, as the two numbers beside it give it."""
    if verdict.basis == "modelled" and verdict.status in ("fp8_slower", "fp8_even", "fp8_faster"):
        return f"{what}, by the cost model"
    if not verdict.step_ms or not verdict.bf16_step_ms:
        return what
    of, against = (max(round(ms, 1), 0.1) for ms in (verdict.step_ms, verdict.bf16_step_ms))
    if verdict.status == "fp8_slower" and of > against:
        return f"FP8 is {_times(of / against)} slower than BF16"
    if verdict.status == "fp8_faster" and against > of:
        return f"FP8 is {_times(against / of)} faster than BF16"
    return what


def _times(ratio: float) -> str:
    return f"{ratio:.1f}×" if ratio >= 2 else f"{ratio:.2f}×"


def _numbers(verdict: Verdict) -> str:
    if not verdict.step_ms:
        return ""
    compared = verdict.bf16_step_ms and verdict.status != "no_fp8"
    against = f" against {verdict.bf16_step_ms:,.1f} ms in BF16" if compared else ""
    return f"{verdict.step_ms:,.1f} ms a step{against}, {verdict.basis or 'as it ran'}"
