"""What may save most is asked first, by what was recorded on an H200."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from fp8doctor.diagnosis.document import read_saved
from fp8doctor.facts import Target, Workload
from fp8doctor.loading.job import Job
from fp8doctor.trial.explorations import SAVED, TrialContext, may_save

RECORDED = Path(__file__).parent.parent / "patients" / "recorded"


def context(patient: str) -> TrialContext:
    facts = read_saved(RECORDED / f"h200-{patient}.json")[0]
    return TrialContext(facts, Job(model=None, target=Target(), workload=Workload()), ())


@pytest.mark.parametrize(
    ("patient", "saved"),
    [("graph_breaks", -0.331), ("decoder_468m_compiled", -0.358), ("trained_decoder", -0.159)],
)
def test_a_recipe_that_was_measured_to_cost_is_expected_to(patient: str, saved: float) -> None:
    rowwise = may_save("recipe-rowwise", context(patient))
    assert rowwise == pytest.approx(saved, abs=0.1)
    assert rowwise < may_save("recipe-rowwise-with-gw-hp", context(patient))


def test_without_checkpointing_what_is_recomputed_is_saved() -> None:
    of = context("checkpointed_needlessly")
    assert 0.1 < may_save("checkpointing-off", of) < 0.25
    assert may_save("checkpointing-off", of) > may_save("recipe-rowwise", of)


def test_layers_that_lose_when_timed_alone_are_expected_to_be_worth_their_loss() -> None:
    assert may_save("keep-in-bf16", context("multi_query")) == pytest.approx(0.035, abs=0.01)


def test_what_cannot_be_modelled_is_expected_to_save_what_it_did() -> None:
    of = context("graph_breaks")
    nobody_knows = msgspec.structs.replace(of.facts, workload=Workload())
    of = TrialContext(nobody_knows, of.job, ())
    assert may_save("keep-in-bf16", of) == SAVED["keep-in-bf16"]
    assert may_save("cache-off", of) == SAVED["cache-off"]
