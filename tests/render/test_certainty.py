"""Is the side of the answer sure, and is its size: on steady, wide, disturbed and impossible times."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from fp8doctor.analysis.noise import Pair, may_turn
from fp8doctor.analysis.trial_view import trial_view
from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.facts import Arm, Facts, Health
from fp8doctor.render.certainty import certainty
from fp8doctor.render.timing import timing as timing_of
from fp8doctor.report import load_report
from tests.checks.arms import timed
from tests.checks.step.profiled import BF16, FP8_COMPILED
from tests.diagnosis.trials import Of
from tests.facts_of import DECODER_468M

HERE = Path(__file__).parents[1]
JOBS = HERE / "benchmarks" / "recorded"

SHARED = Health(throttled_pct={}, other_processes=1, other_use_pct=54.0)


def of_rounds(as_is: tuple[float, ...], bf16: tuple[float, ...], health: Health | None = None) -> Facts:
    facts = Of({"as_is": as_is, "bf16_compiled": bf16}).facts()
    return replace(facts, trial=replace(facts.trial, health=health))


def with_rounds(arm: Arm, *rounds_ms: float) -> Arm:
    middle = sorted(rounds_ms)[len(rounds_ms) // 2]
    return replace(arm, rounds_ms=rounds_ms, step_ms=middle, low_ms=min(rounds_ms), high_ms=max(rounds_ms))


@pytest.mark.parametrize(
    ("bf16_ms", "sure"),
    [
        ((100.0, 160.0, 165.0, 170.0, 180.0), "Faster: yes. How much: no, "),
        ((160.0, 162.0, 165.0, 167.0, 170.0), "No, the answer may change on a quiet machine: "),
    ],
    ids=["a round is possible", "no round is possible"],
)
def test_what_the_kernel_times_rule_out_is_not_believed(bf16_ms: tuple[float, ...], sure: str) -> None:
    """The matmuls take 62.4 of 92.7 ms in BF16 and 36.3 in FP8: no step can be 1.9x as fast."""
    facts = timed(
        DECODER_468M,
        with_rounds(replace(FP8_COMPILED, name="as_is", treatments=()), 88.0, 88.2, 88.3, 88.4, 88.6),
        with_rounds(BF16, *bf16_ms),
    )
    report = diagnose(facts)
    assert trial_view(facts).size_is_wrong
    assert certainty(report).startswith(sure)


NEAR = st.tuples(*[st.floats(99.0, 101.0)] * 5)
LATE = st.tuples(st.floats(99.0, 101.0), *[st.floats(130.0, 200.0)] * 4)


@pytest.mark.slow
@settings(max_examples=20)
@given(fp8=NEAR, bf16=LATE)
def test_others_on_the_gpu_may_turn_what_the_fastest_rounds_do_not_show(
    fp8: tuple[float, ...], bf16: tuple[float, ...]
) -> None:
    """By the fastest rounds both are even; others on the GPU made the rest of BF16's rounds longer."""
    facts = of_rounds(fp8, bf16, SHARED)
    view = trial_view(facts)
    assert view.as_is
    assert view.bf16
    assert may_turn(Pair(view.as_is, view.bf16), facts.trial)
    of_rounds(fp8, bf16)


def test_the_count_of_variants_is_that_of_the_rows_with_a_time() -> None:
    """One recording holds the step with all fixes twice, under two names."""
    timing = timing_of(load_report(JOBS / "h100-llama_8b_compiled.json.gz").facts)
    assert timing is not None
