"""No two lines of a recorded screen contradict each other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fp8doctor import load_report, registry
from fp8doctor.analysis.arms import fair_bf16, ratio_on_screen
from fp8doctor.analysis.significance import EVEN
from fp8doctor.analysis.treatment_table import (
    COMPILE_LAYERS,
    KEEP_IN_BF16,
    LARGER_BATCH,
    MORE_TOKENS,
    STAY_IN_BF16,
)
from fp8doctor.analysis.watched_speedup import watched_ms
from fp8doctor.diagnosis.answer import GRAVE
from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.facts import if_recorded
from fp8doctor.facts.arm_names import ArmName
from fp8doctor.render.causes import as_sentence
from fp8doctor.render.details import fix_in_words
from fp8doctor.render.headline import TOO_LARGE
from fp8doctor.render.screen import first_screen
from fp8doctor.render.timing import timing
from fp8doctor.wording import in_ms, in_times, times
from tests.diagnosis.test_plan_agrees import EVERY, benchmark, replayed


@EVERY
def test_a_plan_that_was_timed_says_what_it_gains(path: Path) -> None:
    _, screen, view = replayed(path)
    if screen.fixes and view.end and view.as_is and not view.end.is_as_is:
        assert re.search(r"\d(\.\d+)?x faster than now", screen.answer.then.sentence)


@EVERY
def test_a_speed_that_is_even_is_called_so_everywhere(path: Path) -> None:
    """The quotient of two times that the screen calls even is no gain."""
    report, screen, view = replayed(path)
    then = screen.answer.then.sentence
    if report.verdict.status == "fp8_even" and (view.end is None or view.end.is_as_is):
        assert not re.search(r"x (faster|slower) than the best BF16", then)
        assert not re.search(r"x (faster|slower) than the best BF16", screen.notes)
    for ratio in re.findall(r"([\d.]+)x faster than the best BF16", then):
        if report.verdict.basis == "measured":
            assert float(ratio) >= 1 + EVEN - 0.005, then


@EVERY
def test_the_best_bf16_of_a_promise_is_that_of_the_title(path: Path) -> None:
    """Another BF16 is called by its name."""
    report, screen, view = replayed(path)
    total = view.end.arm if view.end else view.as_is
    measure = fair_bf16(report.facts, total) if view.on_gpu and total and view.bf16 else None
    named = re.findall(r"the best BF16 \(([\d,.]+ ms)\)", screen.answer.then.sentence)
    if named and view.bf16 and measure and measure.name != ArmName.AS_IS:
        assert named == [in_ms(view.bf16.step_ms)]


@EVERY
def test_an_estimated_plan_says_what_it_gains(path: Path) -> None:
    """A job that is broken gains nothing in speed before it is repaired."""
    report, screen, _ = replayed(path)
    then = screen.answer.then.sentence
    broken = report.verdict.status in GRAVE or STAY_IN_BF16 in {s.treatment.name for s in report.prescription}
    if screen.fixes and "estimated for" in then and not broken:
        assert re.search(r"(than|over|of) now|stays as it is|Once it fits", then)
    assert "than FP8 would be" not in then, "it is the user's own step that stays"


@EVERY
def test_memory_is_compared_with_one_bf16(path: Path) -> None:
    """The row of the job's facts, the table and the finding."""
    report, screen, _ = replayed(path)
    row = dict(screen.facts).get("Memory", "")
    peaks = re.match(r"([\d.]+) of [\d.]+ GiB at the peak.*, ([\d.]+) in BF16", row)
    found = next((each for each in report.findings if each.code == "MEM001"), None)
    if peaks and found:
        more = re.search(r"([\d.]+) GiB more than BF16", found.title)
        assert more
        assert float(more[1]) == pytest.approx(float(peaks[1]) - float(peaks[2]), abs=0.11)


@EVERY
def test_the_parts_of_a_peak_add_up_to_it(path: Path) -> None:
    _, screen, _ = replayed(path)
    row = dict(screen.facts).get("Memory", "")
    found = re.search(r"(?:about )?([\d.]+) (?:of [\d.]+ )?GiB at the peak[^(]*\(([^)]*\d)[^)]*\)", row)
    if found and "at least" not in row and "LayerDrop" not in row and "to" not in row.split("GiB")[0]:
        parts = [float(each) for each in re.findall(r"[a-z] ([\d.]+)", found[2])]
        assert sum(parts) == pytest.approx(float(found[1]), abs=0.05 * (len(parts) + 1))


@EVERY
def test_what_compiles_without_effect_is_not_called_compiled(path: Path) -> None:
    report, screen, _ = replayed(path)
    without = {each.code for each in report.findings if each.severity != "info"} & {"CMP002", "CMP005"}
    row = dict(screen.facts).get("Compiled", "0")
    assert not without or row.startswith(("0", "asked for")), row


@EVERY
def test_no_trial_is_offered_that_does_not_fit(path: Path) -> None:
    _, screen, _ = replayed(path)
    if screen.answer.what == TOO_LARGE:
        assert not any("times it" in each for each in screen.next)
        assert "time it" not in " ".join(screen.answer.fix).lower()


@EVERY
def test_fp8_below_the_bf16_of_a_fix_is_compared_with_the_end(path: Path) -> None:
    """FP8 with a later fix may be faster than BF16 without it, and is no plan: BF16 with it is faster."""
    report, _, view = replayed(path)
    for step in report.prescription:
        took = re.search(r"the fastest FP8 that was timed(?: takes)? ([\d,.]+) ms", step.treatment.summary)
        if took and step.saving_ms and step.saving_ms.to_ms and view.end:
            faster = float(took[1].replace(",", "")) < step.saving_ms.to_ms
            assert not faster or in_ms(view.end.arm.step_ms) in step.treatment.summary


@EVERY
def test_a_plan_that_stays_in_bf16_asks_for_no_larger_batch(path: Path) -> None:
    """But one that was timed, on a GPU."""
    report, _, view = replayed(path)
    names = {step.treatment.name for step in report.prescription}
    asks = names & {MORE_TOKENS, LARGER_BATCH}
    assert STAY_IN_BF16 not in names or not view.end or asks <= {*view.end.changes}


@EVERY
def test_the_column_of_speeds_has_one_bf16(path: Path) -> None:
    """It is the row of 1x; a row of an earlier window is named below the table, with that window's BF16."""
    _, screen, view = replayed(path)
    if view.on_gpu and view.bf16:
        one = next(row for row in screen.variants if row.speed == "1x")
        earlier = screen.compared.partition("Timed earlier")[2]
        for row in screen.variants:
            if row.speed.endswith("x") and row is not one and row.label not in earlier:
                assert row.speed == times(one.ms, row.ms), row.label


NO_REASON = ("The step was not profiled", "This model uses no FP8", "No check found")
"""First words of sentences that explain no speed."""


@EVERY
def test_a_speed_has_a_reason(path: Path) -> None:
    report, screen, _ = replayed(path)
    if report.verdict.basis in ("measured", "modelled") and report.verdict.speedup:
        assert not all(each.startswith(NO_REASON) for each in screen.answer.why)
    if report.verdict.status == "no_fp8" and report.verdict.achievable_speedup:
        assert not all(each.startswith(NO_REASON) for each in screen.answer.why)


@EVERY
def test_the_parts_of_an_estimate_add_up_to_its_speedup(path: Path) -> None:
    """BF16 − matmuls + casts + other work, as shown."""
    report, screen, _ = replayed(path)
    told = re.search(
        r"save about ([\d,.]+) of ([\d,.]+) ms/step.* cost ([\d,.]+)(.*)", " ".join(screen.answer.why)
    )
    ratio = re.search(
        r"about ([\d.]+)x faster|([\d.]+)x for", f"{screen.answer.what} {screen.answer.numbers}"
    )
    if told and ratio and report.verdict.basis == "modelled" and "compiled" not in screen.answer.numbers:
        saved, bf16, casts = (float(each.replace(",", "").rstrip(".")) for each in told.groups()[:3])
        other = re.search(r"take[s]? ([\d,.]+) ms (longer|less)", told[4])
        rest = (1 if other[2] == "longer" else -1) * float(other[1]) if other else 0.0
        assert bf16 / (bf16 - saved + casts + rest) == pytest.approx(float(ratio[1] or ratio[2]), rel=0.03)


def test_a_bf16_job_that_was_timed_reads_what_fp8_would_give() -> None:
    _, screen, _ = benchmark("h100-llama_3b_bf16")
    assert screen.answer.what == "FP8 would be 1.11x faster than BF16"
    _, screen, _ = benchmark("h100-phi3_mini_bf16")
    assert screen.answer.what == "FP8 would be about as fast as BF16"


@EVERY
def test_two_fixes_of_one_layer_know_of_each_other(path: Path) -> None:
    report, _, _ = replayed(path)
    steps = {step.treatment.name: step.treatment for step in report.prescription}
    one, other = steps.get(COMPILE_LAYERS), steps.get(KEEP_IN_BF16)
    if one and other and {*one.layers} & {*other.layers}:
        assert "keep it compiled" in other.summary


@EVERY
def test_nobody_who_stays_in_bf16_looks_for_what_slows_fp8_down(path: Path) -> None:
    report, _, view = replayed(path)
    names = {step.treatment.name for step in report.prescription}
    assert not (view.gives_up_fp8 and "look-at-the-trace" in names)


@EVERY
def test_what_is_of_fp8_alone_is_gone_in_bf16(path: Path) -> None:
    report, screen, _ = replayed(path)
    if any(step.treatment.name == STAY_IN_BF16 for step in report.prescription):
        of_fp8 = {each.code for each in registry.discover() if each.changes_fp8 and not each.stays_in_bf16}
        of_fp8 |= {"STP002", "CKP003", "MEM001"}
        left = [each for each in screen.notices if each.mark != "info" and each.code in of_fp8]
        told = ("gone with", "less with", "fixed by", "its fix makes another job")
        assert all(any(word in each.text for word in told) for each in left)


@EVERY
def test_an_error_among_the_causes_has_a_fix_or_names_it(path: Path) -> None:
    report, screen, _ = replayed(path)
    heads = {step.code for step in report.prescription}
    if report.facts.get("script_error") or report.verdict.status in GRAVE:
        return  # one cause alone stands there
    beside = (each for each in report.findings if each.severity == "error" and each.code not in heads)
    for each in beside:
        if fix_in_words(each, report.prescription, report.facts):
            assert as_sentence(each.title) not in screen.answer.why


@EVERY
def test_nothing_stands_before_a_comma_that_is_not_there(path: Path) -> None:
    _, screen, _ = replayed(path)
    assert not [line for _, line in screen.facts if "(," in line]


@EVERY
def test_a_saving_that_begins_where_a_later_one_ends_names_it(path: Path) -> None:
    report, screen, _ = replayed(path)
    saving = {number: step.saving_ms for number, step in enumerate(report.prescription, 1) if step.saving_ms}
    for fix in screen.fixes:
        own = saving.get(fix.number)
        later = [n for n, each in saving.items() if n > fix.number and own and own.from_ms == each.to_ms]
        if own and own.from_ms and later:
            assert f"with fix {later[0]} to" in fix.aside


@EVERY
def test_what_was_profiled_is_not_estimated(path: Path) -> None:
    _, screen, view = replayed(path)
    if screen.difference and view.on_gpu:
        assert not any("(estimated)" in each and "casts" in each for each in screen.answer.why)


@EVERY
def test_an_estimate_is_likely_if_the_title_takes_a_side(path: Path) -> None:
    _, screen, _ = replayed(path)
    sure, title = screen.answer.sure, screen.answer.what
    takes_a_side = "The fault" not in sure and title != TOO_LARGE
    if takes_a_side and (": likely. " in sure or sure.startswith("No: the estimate")):
        assert sure.startswith("No: ") == (" to tell whether FP8 " in title)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("h200x2-ddp_rank_raises", "An exception ended rank 1"),
        ("h200x2-ddp_rank_killed", "2 ranks were killed, or exited without a shutdown of Python"),
    ],
)
def test_a_rank_that_did_not_end_by_itself_is_the_title(name: str, told: str) -> None:
    report = load_report(Path(__file__).parents[1] / "running" / "recorded" / f"{name}.json.gz")
    assert first_screen(diagnose(report.facts)).answer.what == told


def test_a_job_of_several_processes_is_timed_behind_its_launcher() -> None:
    report = load_report(Path(__file__).parents[1] / "running" / "recorded" / "h200x2-ddp_torchao.json.gz")
    found = diagnose(report.facts)
    assert found.next is not None
    assert found.next.command == "torchrun ... -m fp8doctor run --stop job.py ARGS..."


@EVERY
def test_an_estimate_of_one_rank_is_called_compute(path: Path) -> None:
    """A watched step of several ranks is whole."""
    report, screen, _ = replayed(path)
    distributed = report.facts.get("training.distributed")
    if distributed and distributed.world_size > 1 and report.verdict.basis == "modelled":
        watched = watched_ms(report.facts) is not None
        assert ("FP8 compute" in f"{screen.answer.what} {screen.answer.numbers}") != watched
        assert screen.answer.limit.startswith("Estimated without communication.") != watched


@EVERY
def test_an_upper_bound_rests_on_the_matmuls_that_the_screen_shows(path: Path) -> None:
    """The datasheet counts only without a profiled FP8 step, and no bound is told of matmuls that lose."""
    report, screen, view = replayed(path)
    found = if_recorded(timing, report.facts)
    shown = [each.parts_ms.get("GEMMs", 0.0) for each in found.waterfalls] if found else []
    if "Upper bound" in screen.answer.limit and shown and view.on_gpu:
        assert min(shown) < 0
        assert "datasheet" not in screen.answer.limit


@EVERY
def test_a_disturbed_time_bounds_nothing(path: Path) -> None:
    _, screen, view = replayed(path)
    if view.size_is_wrong:
        assert "Upper bound" not in screen.answer.limit
        low, high = ratio_on_screen(view.bf16, view.as_is).low, ratio_on_screen(view.bf16, view.as_is).high
        assert f"{in_times(low)} to {in_times(high)}" in screen.answer.sure


@EVERY
def test_a_trial_that_took_longer_than_its_budget_says_so(path: Path) -> None:
    report, _, _ = replayed(path)
    found, trial = timing(report.facts), report.facts.get("trial")
    if found is None or trial is None or not trial.get("elapsed_s") or "Timed" not in found.basis:
        return
    late = round(trial.elapsed_s) > trial.budget_s
    told = f", {trial.elapsed_s:.0f} s of a budget of {trial.budget_s:g} s"
    assert (told in found.basis) is late, found.basis


@EVERY
def test_idle_time_is_gone_only_where_the_plan_ends_without_it(path: Path) -> None:
    _, screen, view = replayed(path)
    told = next((each.text for each in screen.notices if each.code == "STP001"), "")
    end = view.end.arm if view.end and not view.end.is_as_is else None
    if re.search(r"\((gone with fix|fixed by) \d\)", told) and end and end.get("breakdown"):
        assert end.breakdown.idle_ms < 0.1 * end.step_ms, told
