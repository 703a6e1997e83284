"""The verdict: measured if there was a trial, else expected from the facts."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from fp8doctor.analysis.rank_comparison import slowest_first
from fp8doctor.analysis.trial_view import TrialView
from fp8doctor.analysis.waiting import script_overhead, waiting_first
from fp8doctor.analysis.whole_step import whole_speedup, whole_step_in_words
from fp8doctor.diagnosis.answer import Verdict, before_speed
from fp8doctor.diagnosis.expected_verdict import (
    expected_verdict,
    fp8_outside_layers,
    named_after_fp8,
    short_of_training,
)
from fp8doctor.diagnosis.measured_verdict import measured_verdict, without_fp8
from fp8doctor.facts import Unrecorded, if_recorded
from fp8doctor.facts.paths import path_of
from fp8doctor.finding import Finding


def verdict(view: TrialView, findings: Sequence[Finding]) -> Verdict:
    """Give the answer, after the waits of a watched script or its ranks."""
    facts = view.facts
    answer = before_speed(_of_precision(view, findings), facts, findings)
    told = filter(None, (if_recorded(each, facts) for each in (waiting_first, script_overhead)))
    first = " ".join(told) or if_recorded(slowest_first, facts)
    timed = answer.basis == "measured"
    of_compute = (answer.speedup, answer.achievable_speedup, answer.bf16_step_ms)
    last = whole_step_in_words(facts, *of_compute) if timed else ""
    low, high = (timed and whole_speedup(facts, *of_compute)) or (None, None)
    return msgspec.structs.replace(
        answer,
        summary=" ".join(filter(None, (first, answer.summary, last))),
        whole_step_low=low or None,
        whole_step_high=high,
    )


def _of_precision(view: TrialView, findings: Sequence[Finding]) -> Verdict:
    """Give the measured verdict, else the expected one.

    FP8 that was asked for and is missing stays so.
    """
    facts = view.facts
    try:
        measured = measured_verdict(view, findings)
        if measured is not None and measured.status != "no_fp8":
            return measured
        expected = expected_verdict(facts, findings)
        told = short_of_training(facts) if measured is not None else ""
    except Unrecorded as missing:
        return Verdict(status="not_measured", summary=f"No verdict: {path_of(missing)} was not recorded.")
    if measured is None:
        return expected
    unclear = named_after_fp8(facts.network.linears) or fp8_outside_layers(facts)
    if expected.status == "fp8_not_engaged" or unclear:
        told = expected.summary
    if not told or view.as_is is None:
        return measured
    return msgspec.structs.replace(without_fp8(view, view.as_is, told), status=expected.status)
