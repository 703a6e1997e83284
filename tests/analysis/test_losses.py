"""Losses of two watched runs."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from fp8doctor.analysis.losses import RunLosses, run_losses
from fp8doctor.diagnosis.comparison import compared
from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.facts import Facts, Observation
from fp8doctor.render.compare_page import page
from fp8doctor.render.table_page import as_text
from tests.facts_of import DECODER_468M


def watched(*losses: float | None, warmup: int = 3) -> Facts:
    seen = Observation(
        steps_ms=tuple(100.0 for _ in losses), warmup=warmup, clock="cuda", losses=losses, compiled=0
    )
    return replace(DECODER_468M, observed=seen)


def told(first: Facts, second: Facts) -> str:
    documents = diagnose(first), diagnose(second)
    found = compared(*documents, ("bf16.json", "fp8.json"))
    return " ".join(as_text(page(found, documents), width=100).split())


def test_only_steps_of_the_same_number_are_compared() -> None:
    """A run that compiles warms up longer: its window begins later."""
    found = run_losses(watched(5.0, 4.0, 3.0, 2.0), watched(3.5, 2.5, 1.5, warmup=5))
    assert found == RunLosses(first_step=6, last_step=7, means=(2.5, 3.0), not_finite_from=(None, None))


@pytest.mark.slow
def test_the_table_holds_both_losses() -> None:
    said = told(watched(5.0, 4.0, 3.0), watched(5.5, 4.1, 3.0))
    assert "training loss 4.0000 4.2000 1.05x" in said


@pytest.mark.slow
def test_a_loss_that_leaves_the_numbers_has_no_mean() -> None:
    said = told(watched(5.0, 4.0, 3.0), watched(5.5, None, None))
    assert "training loss 4.0000 -" in said


@pytest.mark.slow
def test_no_step_in_common() -> None:
    said = told(watched(5.0, 4.0, 3.0), watched(5.0, 4.0, 3.0, warmup=9))
    assert "training loss" not in said


@pytest.mark.slow
def test_one_run_whose_model_gives_no_loss() -> None:
    without = replace(watched(5.0, 4.0, 3.0), observed=replace(watched(5.0).observed, losses=None))
    assert "the loss of fp8.json was not recorded" in told(watched(5.0, 4.0, 3.0), without)
    assert "loss" not in told(without, without).replace("--", "")
