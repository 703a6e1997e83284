"""The four short lines at the top of a page."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from fp8doctor import load_report
from fp8doctor.analysis.treatment_table import COMPILE_BLOCKS, STAY_IN_BF16, that_help_bf16_too, traits
from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.diagnosis.document import Document
from fp8doctor.facts import Facts, Trial, Workload
from fp8doctor.render.box import answer
from fp8doctor.render.headline import headline
from tests.checks.arms import ran, timed
from tests.diagnosis.trials import without_fp8
from tests.facts_of import DECODER_468M
from tests.test_recorded import RECORDED

UNALIGNED = replace(
    DECODER_468M,
    workload=Workload(batch_source="given", batch_size=1, sequence_length=1003, tokens=1003),
)
"""Rows whose weight gradient raises on a GPU, by rule."""


def in_rowwise(*, compiled: bool) -> Document:
    """The decoder in a recipe whose casts cost more than its matmuls save, by the cost model."""
    network = DECODER_468M.network
    linears = tuple(
        replace(each, recipe="rowwise", compiled="block" if compiled else None)
        if each.use == "training"
        else each
        for each in network.linears
    )
    blocks = tuple(replace(each, compiled=each.count if compiled else 0) for each in network.blocks)
    return diagnose(
        replace(
            DECODER_468M,
            assumed_gpu="H100",
            network=replace(network, linears=linears, blocks=blocks),
        )
    )


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [True, False])
def test_fp8_that_the_cost_model_expects_to_lose_is_left_off(compiled: bool) -> None:
    """Also if compiling it makes it faster, as long as it still loses."""
    plan = in_rowwise(compiled=compiled).prescription
    assert [step.treatment.name for step in plan] == [STAY_IN_BF16]


@pytest.mark.slow
def test_a_made_up_batch_gives_no_fp8_up() -> None:
    facts = in_rowwise(compiled=False).facts
    plan = diagnose(replace(facts, workload=replace(facts.workload, batch_source="made up"))).prescription
    assert [step.treatment.name for step in plan] == [COMPILE_BLOCKS]


def test_a_fix_that_bf16_needs_too_stands_beside_leaving_fp8_off() -> None:
    plan = load_report(RECORDED / "h200-te_checkpointed_inside.json.gz").prescription
    first, second = (step.treatment.name for step in plan[:2])
    assert first == STAY_IN_BF16
    assert traits(second).helps_bf16_too


UNCOPIED = "copying it raises TypeError: cannot pickle '_io.TextIOWrapper' object"


@pytest.mark.parametrize("facts", [DECODER_468M, without_fp8(), UNALIGNED], ids=["slow", "no FP8", "raises"])
def test_why_copies_could_not_be_timed_is_said_once(facts: Facts) -> None:
    trial = Trial(device="cuda", gpu="NVIDIA H200", arms=(), reliable=False, reason=UNCOPIED)
    said = answer(diagnose(replace(facts, trial=trial)))
    assert " ".join((*said.why, said.sure)).count(UNCOPIED) == 1


def test_a_plan_that_bf16_gains_from_too_has_no_upper_bound_beside_it() -> None:
    report = load_report(RECORDED / "h200-lora.json.gz")
    assert that_help_bf16_too(step.treatment.name for step in report.prescription)
    assert answer(report).limit == ""


@pytest.mark.parametrize("name", ["te_lora_prepared", "nf4_base", "hidden_te", "cannot_be_saved"])
def test_no_error_is_outside_of_the_box(name: str) -> None:
    report = load_report(RECORDED / f"h200-{name}.json.gz")
    errors = {each.code for each in report.findings if each.severity == "error"}
    assert errors
    assert errors <= answer(report).causes


@pytest.mark.parametrize("bf16_ms", [60.0, 200.0])
def test_a_time_of_a_cpu_is_no_verdict_on_a_gpu(bf16_ms: float) -> None:
    """Neither a success nor a defect of its own."""
    arms = (ran("as_is", 100.0), ran("bf16", bf16_ms), ran("bf16_compiled", bf16_ms))
    report = diagnose(timed(DECODER_468M, *arms, device="cpu"))
    assert report.verdict.status in ("fp8_faster", "fp8_slower")
    assert headline(report, report.prescription)[0] == "plain"
    on_gpu = diagnose(timed(DECODER_468M, *arms))
    assert headline(on_gpu, on_gpu.prescription)[0] != "plain"
