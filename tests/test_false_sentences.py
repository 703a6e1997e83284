"""What no screen may claim, for every recording: as recorded, and as the job looks without a trial."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path

import pytest
from msgspec.structs import replace

from fp8doctor.analysis.memory import samples
from fp8doctor.analysis.modelled_speedup import modelled_speedup
from fp8doctor.analysis.noise import SELF_CHECK_TOLERANCE
from fp8doctor.analysis.step_difference import REST
from fp8doctor.analysis.treatment_table import LARGER_BATCH, STAY_IN_BF16
from fp8doctor.analysis.watched import watched_run
from fp8doctor.answer.commands import MOST_S
from fp8doctor.answer.job import ROWS, TOKENS, job_facts
from fp8doctor.answer.sentences import box
from fp8doctor.cost import rows_of
from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.diagnosis.fitting import MAKES_FIT
from fp8doctor.facts import if_recorded, recorded
from fp8doctor.facts.unrecorded import NOT_RECORDED
from fp8doctor.gpus import modelled_gpu
from fp8doctor.report import Report
from tests.replays import ALL, case, replayed

ASSUMED = ("H100", "B200", "RTX4090", "L4")

LIVE = ("trial", "observed", "ranks", "not_finite", "script_error")
"""What only a job that ran has."""


@functools.cache
def unrun(path: Path) -> Report:
    """The same job as it is looked at without a GPU."""
    gone, gpu = dict.fromkeys(LIVE, NOT_RECORDED), ASSUMED[ALL.index(path) % len(ASSUMED)]
    return Report.of(diagnose(replace(replayed(path).report.facts, **gone, gpus=(), assumed_gpu=gpu)))


@pytest.mark.parametrize("path", ALL, ids=case)
def test_no_claim_is_false(path: Path) -> None:
    what_is_open_on_a_screen_is_open_for_programs(path)
    a_measured_time_bounds_every_estimate(path)
    no_other_bf16_is_faster_than_the_best(path)
    no_step_is_faster_than_its_gpu(path)
    tokens_rows_and_samples_are_told_apart(path)
    a_job_that_may_not_fit_gets_its_memory_fix_first_and_no_tick(path)
    an_unknown_batch_is_named_only_if_no_layer_has_rows(path)
    parts_of_an_estimate_have_names(path)
    time_that_both_forms_have_brings_a_range_nearer_to_1(path)
    advice_can_be_followed(path)
    a_verdict_has_one_clock(path)


def both(path: Path) -> tuple[Report, Report]:
    return replayed(path).report, unrun(path)


def what_is_open_on_a_screen_is_open_for_programs(path: Path) -> None:
    """A plan that leaves FP8 for now never reads as a decision."""
    for report in both(path):
        verdict = json.loads(report.to_json(facts=False))["verdict"]
        asked = [each for each in box(report.answer).lines if each.template == "open.question"]
        assert len(verdict["open"]) == len(asked)
        assert verdict["status"] != "open" or verdict["open"] or report.answer.fault
        leaves = [each for each in report.prescription if each.treatment.name == STAY_IN_BF16]
        for_now = [each for each in leaves if "for now" in each.treatment.summary]
        assert not for_now or verdict["open"]


def a_measured_time_bounds_every_estimate(path: Path) -> None:
    """A step that ran in BF16 is no slower than what BF16 is estimated to take."""
    for report in both(path):
        compared = report.answer.compared
        now, bf16 = compared.now, compared.bf16
        if now and bf16 and not now.in_fp8 and now.ms.basis == "measured" and bf16.ms.basis == "modelled":
            assert bf16.ms.value <= now.ms.value


def no_other_bf16_is_faster_than_the_best(path: Path) -> None:
    rows = replayed(path).rows
    best = next((row.ms for row in rows if row.speed == "1x"), None)
    others = [row.ms for row in rows if "BF16" in row.step and "FP8" not in row.step and row.ms]
    assert best is None or best <= (1 + SELF_CHECK_TOLERANCE) * min((best, *others))


def no_step_is_faster_than_its_gpu(path: Path) -> None:
    """Rows of FLOPs of the Linears, at the datasheet's FP8 rate; features are no tokens."""
    found = replayed(path)
    rate = found.report.verdict.tokens_per_s
    gpu = modelled_gpu(found.report.facts) if rate else None
    linears = found.report.facts.linears()
    if not rate or gpu is None or not gpu.fp8_tflops or any(each.role == "experts" for each in linears):
        return
    ranks = found.report.facts.get("ranks.world_size") or 1
    trained = sum(each.parameters for each in linears if each.requires_grad is not False)
    assert 6 * trained * rate / 1e12 <= gpu.fp8_tflops * ranks


def tokens_rows_and_samples_are_told_apart(path: Path) -> None:
    for report in both(path):
        if not recorded(report.facts, "network"):
            continue
        facts = report.facts
        told = dict(job_facts(facts, report.verdict.tokens_per_s))
        assert TOKENS not in told or facts.workload.sequence_length
        assert ROWS not in told or not facts.workload.sequence_length
        for step in report.prescription:
            if step.treatment.name == LARGER_BATCH and samples(facts) is None:
                size = facts.get("workload.batch_size")
                assert not size or "samples" not in step.treatment.code


def a_job_that_may_not_fit_gets_its_memory_fix_first_and_no_tick(path: Path) -> None:
    report = unrun(path)
    said, plan = report.answer, [step.treatment.name for step in report.prescription]
    if said.memory is None or not said.memory.may_be_too_large:
        assert not MAKES_FIT & {*plan}
        return
    assert box(said).tone != "good"
    if said.fits_in_gib:
        assert plan[0] in MAKES_FIT
    assert not MAKES_FIT & {*plan} or said.compared.gain is None, "nothing prices what makes a job fit"


def an_unknown_batch_is_named_only_if_no_layer_has_rows(path: Path) -> None:
    report = unrun(path)
    facts = report.facts
    if recorded(facts, "network.linears") and any(rows_of(each, facts) for each in facts.network.linears):
        assert report.answer.unknown != "the batch is unknown"


def parts_of_an_estimate_have_names(path: Path) -> None:
    """No unnamed part decides: what is left of an estimated difference is nothing."""
    compared = unrun(path).answer.compared
    if compared.parts_ms and compared.bf16:
        assert abs(compared.parts_ms[REST]) <= 0.002 * compared.bf16.ms.value


def time_that_both_forms_have_brings_a_range_nearer_to_1(path: Path) -> None:
    """A watched step's time that the model leaves out was measured, so the model's error is not of it."""
    facts = replayed(path).report.facts
    run = if_recorded(watched_run, facts)
    if run is None or not facts.network.fp8:
        return
    alone, watched = modelled_speedup(facts), modelled_speedup(facts, run=run)
    if alone and watched and alone.now and watched.now and watched.left_out_ms:
        assert watched.now.high <= max(1.0, alone.now.high) + 1e-6


def advice_can_be_followed(path: Path) -> None:
    """No budget of hours, and no command of somebody's shell."""
    for report in both(path):
        document = json.dumps(json.loads(report.to_json(facts=False)))
        assert all(float(each) <= MOST_S for each in re.findall(r"--budget (\d+)", document))
        commands = [each.command for each in report.answer.open]
        assert not [each for each in commands if re.search(r"\b(timeout|nice|nohup)\b|/tmp/", each or "")]


def a_verdict_has_one_clock(path: Path) -> None:
    report = replayed(path).report
    verdict, facts = report.verdict, report.facts
    if verdict.tokens_per_s and verdict.step_ms and facts.get("workload.tokens"):
        of_step = facts.workload.tokens * (facts.get("workload.accumulate") or 1)
        assert verdict.tokens_per_s * verdict.step_ms / 1e3 == pytest.approx(of_step, rel=0.02)
    for finding in report.findings:
        assert "speedup_over_best_bf16" not in finding.evidence
