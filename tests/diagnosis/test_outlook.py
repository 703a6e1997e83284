"""Where a plan ends, on recordings of every outcome."""

from __future__ import annotations

import re

import pytest
from msgspec.structs import replace

from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.diagnosis.outlook import outlook
from fp8doctor.diagnosis.prescription import prescribe
from fp8doctor.finding import Saving
from fp8doctor.render.screen import first_screen
from fp8doctor.report import Report, load_report
from fp8doctor.wording import in_times, times
from tests.diagnosis.trials import Of, around
from tests.test_recorded import RECORDED, RECORDINGS

ENDS = {
    "decoder_468m": "With this fix: 92.5 ms, 4.0x faster than now and 1.06x faster than the best BF16 "
    "(98.2 ms).",
    "decoder_468m_compiled": "As it is: 92.8 ms, 1.06x faster than the best BF16 (98.2 ms).",
    "decoder_454m": "With fix 1 alone: 129.6 ms, 3.0x faster than now; about as fast as the best BF16 "
    "(130.3 ms). Fix 2 saves 25 to 42 ms/step (estimated), not counted here.",
    "vit_large": "57.6 ms in compiled BF16, 1.30x faster than now.",
    "te_checkpointed_inside": "11.5 ms in BF16 without checkpointing, 2.6x faster than now.",
    "vit": "16.3 ms in BF16, 8.3x faster than now.",
    "cannot_be_saved": "9.3 ms in compiled BF16, 2.0x faster than now.",
    "te_checkpointed": "With this fix: about 1.14x the speed of the best BF16 (estimated for H200). No "
    "estimate of the gain over now: there is none of the step as it is. Apply the fix, then time the step: "
    "fp8doctor te_checkpointed.py",
    "emulated": "With this fix: about 1.10x the speed of the best BF16 (estimated for H200), too "
    "uncertain to tell. No estimate of the gain over now: there is none of the step as it is. Apply the fix, "
    "then time the step: fp8doctor emulated.py",
    "e5m2_forward": "With this fix: about 1.04x the speed of the best BF16 (estimated for H200), too "
    "uncertain to tell. No estimate of the gain over now: there is none of the step as it is. Apply the fix, "
    "then time the step: fp8doctor e5m2_forward.py",
    "fp8_storage": "With FP8: about 0.85x the speed of the best BF16 (estimated for H200), "
    "too uncertain to tell.",
    "experts_in_bf16": "fp8doctor has not timed the fixed step. No estimate: a fix changes which layers "
    "run in FP8, or their shapes. Apply the fix, then time the step: fp8doctor experts_in_bf16.py",
    "mlp": "With this fix: about 3.0x faster than now, about 1.16x the speed of the best BF16 (estimated for "
    "H200).",
    "mlp_large": "With this fix: about 1.35x faster than now, already the best BF16 (estimated for H200).",
    "compile_disabled": "With this fix: 210 to 351 ms/step less than now, about 1.04x the speed of the best "
    "BF16 (estimated for H200), too uncertain to tell.",
    "backend_missing": "Fixed, the step runs in the best BF16 (3.6 ms/step). FP8 with every fix would be "
    "about 1.54x slower than that (estimated for H200). As it is, the job stops before its first step.",
    "mxfp8_on_hopper": "With this fix: about 1.10x the speed of the best BF16 (estimated for H200)"
    ", too uncertain to tell.",
    "unaligned": "fp8doctor has not timed the fixed step. No estimate: a fix changes which layers "
    "run in FP8, or their shapes. Apply the fix, then time the step: fp8doctor unaligned.py",
    "accelerate_eager": "Fixed, the step runs in the best BF16 (6.8 ms/step). FP8 with every fix would be "
    "about 1.55x slower than that (estimated for H200). No estimate as it is: no cost model for these "
    "layers as they are.",
    "nf4_base": "FP8 cannot win here (estimated). No estimate as it is: no cost model for these layers as "
    "they are. Apply the fix, then time the step: fp8doctor nf4_base.py",
    "lora_plain": "Compiled, BF16 would be about 1.47x faster than now (estimated for H200).",
}

RATIO = re.compile(
    r"([\d,.]+) ms, (?:[\d.]+x faster than now and )?([\d.]+)x (faster|slower) than the best BF16 "
    r"\(([\d,.]+) ms\)"
)


def replayed(name: str) -> Report:
    return load_report(RECORDED / f"h200-{name}.json.gz")


@pytest.mark.parametrize("name", ENDS)
def test_the_plan_ends_in_a_state(name: str) -> None:
    assert outlook(replayed(name)).sentence == ENDS[name]


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (around(120.0), "No FP8 that was timed is as fast:"),
        ((80.0, 95.0, 100.0, 105.0, 120.0, 99.0), "No FP8 that was timed is faster beyond noise:"),
    ],
)
def test_a_change_that_the_timing_cannot_tell_from_bf16_is_not_called_slower(
    other: tuple[float, ...], why: str
) -> None:
    arms = {"as_is": around(130.0), "bf16": around(103.6), "bf16_compiled": around(92.7)}
    report = diagnose(Of({**arms, "recipe-rowwise": other}, bases={"recipe-rowwise": "as_is"}).facts())
    assert why in report.verdict.summary


@pytest.mark.slow
def test_no_plan_is_without_an_end_and_every_ratio_is_that_of_the_numbers_beside_it() -> None:
    ratios = 0
    for path in RECORDINGS:
        report = load_report(path)
        end = outlook(report).sentence
        assert end or not report.prescription
        for total, ratio, how, bf16 in RATIO.findall(end):
            ratios += 1
            speedup = float(bf16.replace(",", "")) / float(total.replace(",", ""))
            assert in_times(speedup if how == "faster" else 1 / speedup) == f"{ratio}x"
    assert ratios > 10


def test_a_ratio_is_that_of_the_numbers_as_they_are_shown() -> None:
    assert times(0.149, 0.051) == "1.00x"
    assert times(1.0, 0.0) == "unknown"


def test_what_saves_under_one_per_cent_is_folded_and_whole_with_verbose() -> None:
    report = replayed("trained_outlier")
    step = report.prescription[0]
    small = Saving(low=0.1, high=0.2, basis="measured", gpu="NVIDIA H200")
    folded = replace(report, prescription=(replace(step, saving_ms=small),))
    screen = first_screen(folded)
    assert screen.fixes == ()
    assert step.code in screen.folded
    assert [each.code for each in first_screen(folded, whole=True).fixes] == [step.code]


def test_an_error_is_never_folded() -> None:
    report = diagnose(replayed("cannot_be_saved").facts)
    small = Saving(low=0.0, high=0.1, basis="measured", gpu="NVIDIA H200")
    proposed = prescribe(report.findings, report.facts)
    steps = tuple(replace(each, saving_ms=small) for each in proposed)
    assert "MOD010" in {each.code for each in first_screen(replace(report, prescription=steps)).fixes}


@pytest.mark.slow
def test_what_was_made_up_is_told_in_one_line() -> None:
    facts = replayed("decoder_468m").facts
    workload = replace(facts.workload, batch_source="made up", loss_source="mean")
    first_screen(diagnose(replace(facts, workload=workload)))
    given = replace(workload, batch_source="given", loss_source="given", optimizer_source="given")
    trained = replace(facts.trial, gaps={})
    assert first_screen(diagnose(replace(facts, workload=given, trial=trained))).made_up == ""
