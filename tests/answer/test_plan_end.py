"""A plan ends in the variant with the fewest changes of those that are as fast as the fastest."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from fp8doctor.analysis.arms import Variant, all_changes, ratio
from fp8doctor.analysis.noise import SELF_CHECK_TOLERANCE
from fp8doctor.analysis.trial_view import TrialView
from fp8doctor.facts import Facts
from tests.diagnosis.trials import Of, around
from tests.replays import ALL, replayed

CHANGES = {"as_is": 0, "bf16_compiled": 1, "compile-blocks": 1, "prescribed": 2}
"""Variant -> changes of a job in FP8; the last is compiled and in another recipe."""


def facts(times: dict[str, tuple[float, ...]], not_finite: str = "") -> Facts:
    bases = {"compile-blocks": "as_is", "prescribed": "as_is"}
    found = Of({**times}, treatments=("compile-blocks", "recipe-rowwise"), bases=bases).facts()
    arms = tuple(
        replace(each, non_finite=("loss",) if each.name == not_finite else ()) for each in found.trial.arms
    )
    return replace(found, trial=replace(found.trial, arms=arms))


def end_of(times: dict[str, tuple[float, ...]], not_finite: str = "") -> Variant:
    found = TrialView(facts(times, not_finite)).end
    assert found is not None
    return found


TIMES = st.one_of(st.floats(50.0, 200.0), st.floats(99.0, 103.0))


@settings(max_examples=60)
@given(st.tuples(TIMES, TIMES, TIMES, TIMES), st.sampled_from(["", "compile-blocks", "prescribed"]))
def test_nothing_simpler_is_as_fast(times: tuple[float, ...], not_finite: str) -> None:
    ms = dict(zip(CHANGES, times, strict=True))
    end = end_of({name: around(each, 0.0) for name, each in ms.items()}, not_finite)
    rest = {name: each for name, each in ms.items() if name != not_finite}
    limit = (1 + SELF_CHECK_TOLERANCE) * min(rest.values()) * 1.002
    assert end.arm.name in rest
    assert end.is_as_is or rest[end.arm.name] <= limit
    assert end.is_as_is or rest[end.arm.name] < rest["as_is"]
    surely = (1 + SELF_CHECK_TOLERANCE) * min(rest.values()) * 0.998
    simpler = {name for name in rest if CHANGES[name] < CHANGES[end.arm.name]}
    assert not {name for name in simpler if rest[name] <= surely}


WIDE = (70.0, 78.0, 79.0, 80.0, 110.0)
"""Rounds that hold 100 ms."""


@pytest.mark.parametrize(
    ("times", "end"),
    [
        ({"as_is": around(100.0), "prescribed": WIDE}, "as_is"),
        ({"as_is": around(100.0), "bf16_compiled": WIDE}, "as_is"),
        ({"as_is": around(150.0), "compile-blocks": around(82.0), "prescribed": WIDE}, "compile-blocks"),
        ({"as_is": around(150.0), "bf16_compiled": around(82.0), "prescribed": WIDE}, "prescribed"),
        ({"as_is": around(100.0), "bf16_compiled": around(90.0), "prescribed": WIDE}, "bf16_compiled"),
    ],
    ids=[
        "the user's own stays",
        "in FP8 too",
        "noise ties in one precision",
        "noise alone changes no precision",
        "what noise hides keeps nothing in its place",
    ],
)
def test_noise(times: dict[str, tuple[float, ...]], end: str) -> None:
    assert end_of({"bf16_compiled": around(120.0), **times}).arm.name == end


def test_where_bf16_is_not_finite_either_the_fastest_step_counts() -> None:
    times = {"as_is": around(100.0), "bf16_compiled": around(120.0), "prescribed": around(80.0)}
    found = facts(times)
    arms = tuple(replace(each, non_finite=("loss",)) for each in found.trial.arms)
    end = TrialView(replace(found, trial=replace(found.trial, arms=arms))).end
    assert end is not None
    assert end.arm.name == "prescribed"


def test_a_time_of_some_fixes_is_not_told_as_that_of_all() -> None:
    """The timed end of a plan, and the estimate that a plan makes of its BF16, in every recording."""
    partly = fair = alone = 0
    for said in (replayed(path).report.answer for path in ALL):
        compared, fixes = said.compared, said.fixes
        untimed = [not (each.together or each.saving_ms) for each in fixes]
        timed = compared.end is not None and compared.end.ms.basis == "measured" and compared.gain
        if timed and not said.leaves_fp8 and any(untimed) and not all(untimed):
            assert 0 < len(said.timed_fixes) < len(fixes)
            partly += 1
        fair += compared.is_fair and compared.end is not None and compared.end.ms.basis == "modelled"
        alone += compared.now is None and compared.end is not None
        if said.is_compute and said.speedup.basis == "measured" and said.status != "open":
            assert said.whole or said.open
    assert partly > 2
    assert fair > 2
    assert alone > 0


def scaled(facts: Facts, name: str, by: float) -> Facts:
    """A trial in which one variant took another time."""
    arms = tuple(
        replace(each, step_ms=by * each.step_ms, rounds_ms=tuple(by * ms for ms in each.rounds_ms))
        if each.name == name
        else each
        for each in facts.trial.arms
    )
    return replace(facts, trial=replace(facts.trial, arms=arms))


@pytest.mark.parametrize("by", [0.5, 0.9, 1.1, 2.0])
def test_nothing_surely_beats_the_end_whatever_the_times(by: float) -> None:
    """Of each recording, with the time of each variant changed."""
    held = 0
    for path in ALL:
        recording = replayed(path)
        for name in recording.view.timed if recording.view.end else ():
            view = TrialView(scaled(recording.report.facts, name, by))
            now, end = view.as_is, view.end
            if now is None or end is None or not now.is_finite:
                continue
            late = any(all_changes(view.trial, each) for each in view.late.values())
            for each in view.table:
                waits = late and each.changes and not each.in_fp8  # for FP8 with the same changes
                beats = all(
                    of.side != "open" and of.low > 1 for of in (view.speed(each, now), view.speed(each, end))
                )
                apart = ratio(end.arm, each.arm).value > 1 + SELF_CHECK_TOLERANCE
                assert waits or not each.is_finite or not (beats and apart), (path.name, name, each.name)
                held += 1
    assert held > 1000
