"""What no screen may claim, for every recording: as recorded, without a GPU, as ``run`` sees it, out of time.

``S1`` and so on number the false claims that a rule of its own ended."""

import functools
import json
import math
import re
from pathlib import Path

import pytest
from msgspec.structs import replace

from fp8doctor.analysis.arms import lacked_time
from fp8doctor.analysis.fp8_request import under_unsloth
from fp8doctor.analysis.layers import to_convert
from fp8doctor.analysis.memory import fit, memory_row, samples
from fp8doctor.analysis.modelled_speedup import modelled_speedup
from fp8doctor.analysis.noise import SELF_CHECK_TOLERANCE
from fp8doctor.analysis.step_difference import REST
from fp8doctor.analysis.treatment_table import LARGER_BATCH, STAY_IN_BF16
from fp8doctor.analysis.trial_view import TrialView
from fp8doctor.analysis.watched import watched_run
from fp8doctor.answer.job import ROWS, TOKENS, job_facts
from fp8doctor.answer.open_questions import MOST_S, UNCOMPILED
from fp8doctor.answer.sentences import box
from fp8doctor.cost.matmuls import rows_of
from fp8doctor.cost.step_cost import with_linears_compiled
from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.diagnosis.estimate import Expected, changes_fp8, compiles, converts, is_modelled
from fp8doctor.facts import NOT_RECORDED, Arm, Facts, Observation, if_recorded, recorded
from fp8doctor.facts.arm_names import BF16_BASELINES, ArmName, Reason, is_conversion
from fp8doctor.gpus import modelled_gpu
from fp8doctor.report import Report
from tests.replays import ALL, case, replayed

ASSUMED = ("H100", "B200", "RTX4090", "L4")

LIVE = ("trial", "observed", "ranks", "not_finite", "script_error")
"""What only a job that ran has."""


BF16_COMPILED = (ArmName.BF16_AS_COMPILED, ArmName.BF16_COMPILED)

QUICKER = 0.75
"""Factor of a watched step's times, so that the cost model is too slow for the job."""


@functools.cache
def unrun(path: Path) -> Report:
    """The same job as it is looked at without a GPU; once for a job that several GPUs recorded."""
    name = case(path).split("-", 2)
    alike = [each for each in ALL if case(each).split("-", 2)[::2] == name[::2]]
    if alike[0] != path:
        return unrun(alike[0])
    gone, gpu = dict.fromkeys(LIVE, NOT_RECORDED), ASSUMED[ALL.index(path) % len(ASSUMED)]
    return Report.of(diagnose(replace(replayed(path).report.facts, **gone, gpus=(), assumed_gpu=gpu)))


@functools.cache
def in_a_script(path: Path) -> Report | None:
    """A job in BF16 as ``run`` watches it, quicker than it was timed; None of FP8, or without its time."""
    view = replayed(path).view
    if not view.on_gpu or view.as_is is None or view.uses_fp8:
        return None
    seen = Observation(clock="cuda", steps_ms=tuple(QUICKER * ms for ms in view.as_is.arm.rounds_ms))
    return Report.of(diagnose(replace(view.facts, trial=NOT_RECORDED, observed=seen)))


def without_time_for(name: str, path: Path) -> Report:
    """The same trial, whose budget left no time for one variant."""
    facts = replayed(path).report.facts
    arms = (
        Arm(name=name, treatments=each.get("treatments", ()), tried=False, why=Reason.NO_TIME_LEFT)
        if each.name == name
        else each
        for each in facts.trial.arms
    )
    return Report.of(diagnose(replace(facts, trial=replace(facts.trial, arms=tuple(arms)))))


@pytest.mark.parametrize("path", ALL, ids=case)
def test_no_claim_is_false(path: Path) -> None:
    what_is_open_on_a_screen_is_open_for_programs(path)
    what_decides_and_had_no_time_is_open(path)
    an_uncompiled_step_is_compiled_or_that_is_open(path)
    a_size_that_is_open_is_no_headline(path)
    a_plan_agrees_with_its_estimate(path)
    memory_with_an_unknown_part_is_a_least(path)
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
    fp8_of_torchao_begins_compiled(path)
    layers_that_nothing_compiles_are_estimated_so(path)


def both(path: Path) -> tuple[Report, Report]:
    return replayed(path).report, unrun(path)


def every(path: Path) -> tuple[Report, ...]:
    watched = in_a_script(path)
    return (*both(path), *((watched,) if watched else ()))


def what_is_open_on_a_screen_is_open_for_programs(path: Path) -> None:
    """S1: a plan that leaves FP8 for now never reads as a decision."""
    for report in both(path):
        verdict = json.loads(report.to_json(facts=False))["verdict"]
        asked = [each for each in box(report.answer).lines if each.template == "open.question"]
        assert len(verdict["open"]) == len(asked)
        assert verdict["status"] != "open" or verdict["open"] or report.answer.fault
        leaves = [each for each in report.prescription if each.treatment.name == STAY_IN_BF16]
        for_now = [each for each in leaves if "for now" in each.treatment.summary]
        assert not for_now or verdict["open"]


def what_decides_and_had_no_time_is_open(path: Path) -> None:
    """S2: a trial without time for what it builds first leaves that open, with a command.

    Unless FP8 would gain too little if its casts were free. As recorded, and one variant planted in turn.
    """
    facts = replayed(path).report.facts
    if not TrialView(facts).on_gpu:
        return
    planned = [each.name for each in facts.trial.arms]
    conversions = filter(is_conversion, planned)
    first = {*BF16_COMPILED, ArmName.PRESCRIBED, next(conversions, None)} & {*planned}
    timed = [each.name for each in facts.trial.arms if each.name in first and each.tried]
    reports = [replayed(path).report] if any(each.name in first for each in lacking(facts)) else []
    if timed:
        reports.append(without_time_for(sorted(timed)[ALL.index(path) % len(timed)], path))
    for report in reports:
        if not (report.answer.is_decided or report.answer.fault):
            assert report.answer.command


def lacking(facts: Facts) -> list[Arm]:
    return [each for each in facts.trial.arms if lacked_time(each)]


def an_uncompiled_step_is_compiled_or_that_is_open(path: Path) -> None:
    """S3: nothing to change is no answer to an untimed job that nothing compiles."""
    for report in every(path):
        said, linears = report.answer, report.facts.linears()
        timed = bool(said.steps and said.steps.rows)  # then the variant that is open has a name
        eager = linears and all(each.get("compiled") is None for each in linears)
        answered = timed or said.fault or said.takes_no_fp8 or if_recorded(under_unsloth, report.facts)
        if eager and not answered:
            named = any(UNCOMPILED in each.what for each in said.open)
            assert named or any(map(compiles, said.fixes))


def a_size_that_is_open_is_no_headline(path: Path) -> None:
    """S14, S8: a speedup of which only the side is sure has no size, in words or in the JSON."""
    for report in every(path):
        said, verdict = report.answer, report.verdict
        if said.speedup is None or not said.speedup.has_open_size:
            continue
        assert verdict.speedup is None
        if said.speedup.side != "open" and not said.fault and not said.state:
            assert not re.search(r"\dx", box(said).title.text.partition(";")[0])
            assert verdict.open
            assert verdict.status != "fp8_slower" or verdict.basis != "measured" or report.reaches("error")
        if said.speedup.side != "open" or said.fault:
            shown = box(said).numbers
            assert shown is None or shown.template == "numbers.one"


def a_plan_agrees_with_its_estimate(path: Path) -> None:
    """S3: no plan converts to an FP8 that the same estimate calls slower or open."""
    for report in every(path):
        found = report.answer.speedup
        if found and found.basis != "measured" and not report.answer.has_fp8 and not report.answer.fault:
            assert found.side == "faster" or not any(map(converts, report.prescription))


def memory_with_an_unknown_part_is_a_least(path: Path) -> None:
    """S4."""
    facts = unrun(path).facts
    found = if_recorded(fit, facts)
    if found:
        is_least = found.now.activations is None
        assert if_recorded(memory_row, facts).startswith("at least") is is_least or found.now.gib < 0.05


def a_measured_time_bounds_every_estimate(path: Path) -> None:
    """S3: BF16 is estimated to take no longer than it took; nor is it, compiled, slower than uncompiled."""
    for report in every(path):
        compared = report.answer.compared
        now, bf16 = compared.now, compared.bf16
        if now and bf16 and not now.in_fp8 and now.ms.basis == "measured" and bf16.ms.basis == "modelled":
            assert bf16.ms.value <= now.ms.value
    watched = in_a_script(path)
    expects = watched and Expected(watched.facts, watched.findings).now
    own = watched and if_recorded(modelled_speedup, watched.facts)
    if expects and own and own.now and expects.ran_ms and expects.now:
        assert expects.now.value == pytest.approx(own.now.value)


def no_other_bf16_is_faster_than_the_best(path: Path) -> None:
    """S9."""
    view, bf16 = replayed(path).view, replayed(path).report.answer.compared.bf16
    forms = [each for each in view.facts.arms() if each.name in BF16_BASELINES and each.tried]
    if view.on_gpu and bf16 and bf16.ms.basis == "measured":
        assert bf16.ms.value <= min((each.step_ms for each in forms if each.step_ms), default=math.inf)
    rows = replayed(path).rows
    best = next((row.ms for row in rows if row.speed == "1x"), None)
    others = [row.ms for row in rows if "BF16" in row.step and "FP8" not in row.step and row.ms]
    assert best is None or best <= (1 + SELF_CHECK_TOLERANCE) * min((best, *others))


def no_step_is_faster_than_its_gpu(path: Path) -> None:
    """S5: rows of FLOPs of the Linears, at the datasheet's FP8 rate; features are no tokens."""
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
    """S5, S15."""
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
    """S6."""
    report = unrun(path)
    said, frees = report.answer, [recorded(step, "peak_gib") for step in report.prescription]
    for_memory = [step for step in report.prescription if not is_modelled(step)]
    if said.memory is None or not said.memory.may_be_too_large:
        assert not any(frees)
        return
    assert box(said).tone != "good"
    if said.fits_in_gib:
        assert frees[0] or is_modelled(report.prescription[frees.index(True)])
    unpriced = any(recorded(step, "peak_gib") for step in for_memory)
    assert not unpriced or said.compared.gain is None, "nothing prices what only makes a job fit"


def an_unknown_batch_is_named_only_if_no_layer_has_rows(path: Path) -> None:
    """S7."""
    report = unrun(path)
    facts = report.facts
    if recorded(facts, "network.linears") and any(rows_of(each, facts) for each in facts.network.linears):
        assert report.answer.unknown != "nothing says how many rows the layers multiply"


def parts_of_an_estimate_have_names(path: Path) -> None:
    """S13: no unnamed part decides: what is left of an estimated difference is nothing."""
    compared = unrun(path).answer.compared
    if compared.parts_ms and compared.bf16:
        assert abs(compared.parts_ms[REST]) <= 0.002 * compared.bf16.ms.value


def time_that_both_forms_have_brings_a_range_nearer_to_1(path: Path) -> None:
    """S8: a watched step's time that the model leaves out was measured, so the model's error is not of it."""
    facts = replayed(path).report.facts
    run = if_recorded(watched_run, facts)
    if run is None or not facts.network.fp8:
        return
    alone, watched = modelled_speedup(facts), modelled_speedup(facts, run=run)
    if alone and watched and alone.now and watched.now and watched.left_out_ms:
        assert watched.now.high <= max(1.0, alone.now.high) + 1e-6


def advice_can_be_followed(path: Path) -> None:
    """S12, S15: no budget of hours, and no command of somebody's shell."""
    for report in both(path):
        document = json.dumps(json.loads(report.to_json(facts=False)))
        assert all(float(each) <= MOST_S for each in re.findall(r"--budget (\d+)", document))
        commands = [each.command for each in report.answer.open]
        assert not [each for each in commands if re.search(r"\b(timeout|nice|nohup)\b|/tmp/", each or "")]


def a_verdict_has_one_clock(path: Path) -> None:
    """S10."""
    report = replayed(path).report
    verdict, facts = report.verdict, report.facts
    if verdict.tokens_per_s and verdict.step_ms and facts.get("workload.tokens"):
        of_step = facts.workload.tokens * (facts.get("workload.accumulate") or 1)
        assert verdict.tokens_per_s * verdict.step_ms / 1e3 == pytest.approx(of_step, rel=0.02)
    for finding in report.findings:
        assert "speedup_over_best_bf16" not in finding.evidence


def fp8_of_torchao_begins_compiled(path: Path) -> None:
    """A plan that converts an uncompiled model by torchao compiles it too, also after a fault."""
    for report in every(path):
        eager = [each for each in if_recorded(to_convert, report.facts) or () if each.compiled is None]
        begins = any(changes_fp8(step) and "torchao" in step.treatment.code for step in report.prescription)
        assert report.answer.has_fp8 or not (begins and eager) or any(map(compiles, report.prescription))


def layers_that_nothing_compiles_are_estimated_so(path: Path) -> None:
    """The step whose compilation has no effect is known, and takes as long as without it."""
    report = unrun(path)
    idle = [each for each in report.findings if each.name == "compile-without-effect"]
    if idle and idle[0].evidence["idle_fp8_linears"] == len(report.facts.network.fp8) > 0:
        eager = with_linears_compiled(report.facts, yes=False)
        alone, told = if_recorded(modelled_speedup, eager), report.answer.speedup
        assert alone
        assert told
        assert told.value == pytest.approx(alone.now.value)
