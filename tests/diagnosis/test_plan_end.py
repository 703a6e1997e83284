"""Where a plan ends: in BF16 if FP8 cannot win, and in no change that noise hides."""

from __future__ import annotations

import pytest

from fp8doctor.analysis.treatment_table import STAY_IN_BF16
from fp8doctor.analysis.trial_view import trial_view
from tests import replays
from tests.diagnosis.trials import Of

SAME_END = {
    "backend_missing": STAY_IN_BF16,
    "env_overridden": STAY_IN_BF16,
    "converted_by_hand": STAY_IN_BF16,
    "gpt2_conv1d": STAY_IN_BF16,
    "setting_without_effect": STAY_IN_BF16,
    "accelerate_eager": STAY_IN_BF16,
    "old_versions": STAY_IN_BF16,
    "backend_without_fp8": STAY_IN_BF16,
    "debug_switches": "switches-off",
}


@pytest.mark.parametrize("name", SAME_END)
def test_fp8_that_cannot_win_is_not_switched_on(name: str) -> None:
    plan = replays.of("patients", f"h200-{name}").report.prescription
    assert [step.treatment.name for step in plan] == [SAME_END[name]]


def test_a_variant_that_noise_hides_is_known_where_no_fix_is() -> None:
    """Compiled it took 278.3 ms and as it is 308.6, in rounds of 0.89 to 1.21."""
    report, _, view = replays.of("patients", "h200-te_llama_7b")
    assert view.end is not None
    assert view.end.is_as_is
    assert view.end.hidden is not None
    assert not report.prescription


@pytest.mark.parametrize(
    ("fixed", "hidden"),
    [
        ((70.0, 78.0, 79.0, 80.0, 110.0), True),
        ((78.0, 78.5, 79.0, 79.5, 80.0), False),
        ((97.0, 99.0, 99.5, 100.0, 103.0), False),
    ],
    ids=["hidden by noise", "surely faster", "no faster by two copies"],
)
def test_only_a_difference_that_noise_hides_is_told(fixed: tuple[float, ...], hidden: bool) -> None:
    arms: dict[str, tuple[float, ...] | str] = {
        "as_is": (99.0, 99.5, 100.0, 100.5, 101.0),
        "bf16_compiled": (119.0, 119.5, 120.0, 120.5, 121.0),
        "prescribed": fixed,
    }
    end = trial_view(Of(arms, bases={}).facts()).end
    assert end is not None
    assert (end.hidden is not None) == hidden
