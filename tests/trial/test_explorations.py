"""What may save most is asked first, by what was recorded on an H200."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from torch import nn

from fp8doctor.analysis.treatment_table import traits
from fp8doctor.diagnosis.document import read_saved
from fp8doctor.facts import Target, Workload
from fp8doctor.facts.unrecorded import NOT_RECORDED
from fp8doctor.loading.job import Job
from fp8doctor.trial.explorations import TrialContext, explorations, may_save
from fp8doctor.trial.layers.shapes import of_interest

RECORDED = Path(__file__).parent.parent / "patients" / "recorded"


def context(patient: str) -> TrialContext:
    facts = read_saved(RECORDED / f"h200-{patient}.json.gz")[0]
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
    assert may_save("keep-in-bf16", of) == traits("keep-in-bf16").saves
    assert may_save("cache-off", of) == traits("cache-off").saves


def test_layers_that_keep_no_record_of_their_recipe_stop_no_trial() -> None:
    """As those of `te.ops`."""
    of = context("te_fused")
    lost = {"recipe": NOT_RECORDED, "engaged": NOT_RECORDED}
    unknown = tuple(msgspec.structs.replace(each, **lost) for each in of.facts.linears())
    network = msgspec.structs.replace(of.facts.network, linears=unknown)
    facts = msgspec.structs.replace(of.facts, network=network)
    job = replace(of.job, model=nn.Linear(2, 2, dtype=torch.bfloat16))
    assert "te-autocast" not in explorations(TrialContext(facts, job, ()))
    assert of_interest(facts) == []
