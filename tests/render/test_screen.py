"""The first screen answers five questions by itself: is FP8 slower, why, what to do, what comes then, is it
sure; on every recorded job, in a user's words, and within the terminal."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from msgspec.structs import replace

from fp8doctor.analysis.treatment_table import TREATMENTS
from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.diagnosis.document import Document
from fp8doctor.diagnosis.prescription import prescribe
from fp8doctor.facts import Trial, Workload
from fp8doctor.facts.arm_names import ArmName
from fp8doctor.finding import Saving
from fp8doctor.render import text
from fp8doctor.render.box import LABELS
from fp8doctor.render.details import details
from fp8doctor.render.drawing import FILLS, draw
from fp8doctor.render.html import view
from fp8doctor.render.planned_fixes import plan, saves
from fp8doctor.render.screen import Screen, first_screen
from fp8doctor.render.terminal import columns, printable_lines
from fp8doctor.report import Report, load_report
from tests.checks.arms import ran, timed
from tests.checks.step.profiled import BF16, FP8_COMPILED, FP8_EAGER
from tests.diagnosis.trials import Of, around, render
from tests.facts_of import DECODER_468M
from tests.recordings import files, name_of
from tests.render.reports import SCREENS
from tests.treatment_names import all_names
from tests.waiting import LONGEST_S

JOBS = Path(__file__).parents[1] / "benchmarks" / "recorded"
RECORDED = files(Path(__file__).parents[1] / "patients" / "recorded")
WIDTHS = (60, 80, 100, 120)

INTERNAL = re.compile(
    r"\bas_is\b|\bprescribed\b|rowwise_with|came out at|\barm\b|_first\b|"
    r"\bbf16_compiled\b|"
    + "|".join(rf"(?<![\w-]){name}(?![\w-])" for name in (*TREATMENTS, *all_names()) if "-" in name)
)
"""Names of variants, treatments and parts that mean something to this program only."""

A_TIME = re.compile(r"\d ms\b")


def of(patient: str) -> Screen:
    return first_screen(load_report(RECORDED[0].with_name(f"h200-{patient}.json.gz")))


def watched(job: str) -> Report:
    return load_report(RECORDED[0].parents[2] / "running" / "recorded" / f"{job}.json.gz")


def without_code(first: Screen, screen: str) -> list[str]:
    code = {line.strip() for fix in first.fixes for line in printable_lines(fix.lines)}
    return [line for line in screen.splitlines() if line.strip() not in code]


@pytest.mark.slow
def test_operators_of_a_cpu_are_no_kernels_and_where_none_runs_no_gpu_is_idle() -> None:
    parts = FP8_EAGER.breakdown
    assert parts is not None
    starved = replace(parts, families_ms={"cast": 1.0}, idle_ms=370.8)
    arms = replace(FP8_EAGER, breakdown=starved), BF16
    seen, on_cpu = (diagnose(timed(DECODER_468M, *arms, device=each)) for each in ("cuda", "cpu"))
    assert "idle GPU +" in text.render(seen)
    screen = " ".join(text.render(on_cpu, verbose=True).replace("│", " ").split())
    assert "measured on the CPU" in screen
    assert "Not for a GPU: " in screen
    assert "which has no kernels of a GPU" in screen
    for words in ("idle", "Idle", "casts +", "its kernels took"):
        assert words not in screen


def test_what_is_modelled_is_not_small_beside_the_step_of_a_cpu() -> None:
    slow = replace(FP8_EAGER, step_ms=1e6, rounds_ms=(1e6,) * 6)
    for device, folded in (("cuda", 1), ("cpu", 0)):
        report = diagnose(timed(DECODER_468M, slow, BF16, device=device))
        steps = tuple(
            replace(each, saving_ms=Saving(low=1.0, high=2.0, basis="modelled", gpu="NVIDIA H100"))
            for each in prescribe(report.findings, report.facts)
            if each.code == "CMP001"
        )
        assert len(plan(replace(report, prescription=steps))[1]) == folded


@pytest.mark.slow
@pytest.mark.parametrize("path", RECORDED, ids=name_of)
def test_the_screen_of_every_recorded_job(path: Path) -> None:
    """The five answers stand in the box, nothing in a word of our own, and nothing is wider than asked."""
    report = load_report(path)
    first, width = first_screen(report), WIDTHS[RECORDED.index(path) % len(WIDTHS)]
    screen = draw(first, width=width, colour=False, ascii=False)
    lines = without_code(first, screen)
    assert not [line for line in lines if columns(line) > width or line != line.rstrip()]
    assert not INTERNAL.search("\n".join(lines)), INTERNAL.search("\n".join(lines))
    answers_the_five(report, first, screen)


def answers_the_five(report: Document, first: Screen, screen: str) -> None:
    """Hold the box to the five questions."""
    found = first.answer
    rows = [line.split()[1] for line in screen.splitlines() if re.match(r"│ [A-Z]\w+  +\S", line)]
    assert [row for row in rows if row in LABELS] == [
        label
        for label in LABELS
        if label not in ("Limit", "Memory") or (found.limit if label == "Limit" else found.memory)
    ]
    assert all((found.what, found.why, found.fix, found.then, found.sure))
    verdict = report.verdict
    if verdict.basis == "measured" and verdict.status in ("fp8_slower", "fp8_even", "fp8_faster"):
        sure = found.sure.lower()
        assert f"{verdict.step_ms:,.1f} vs {verdict.bf16_step_ms:,.1f} ms/step, " in found.numbers
        assert re.search("measured|extrapolated from", found.numbers)
        assert A_TIME.search(found.then.sentence)
        assert re.match(
            r"(yes|no|(not )?(slower|faster)( or even)?( as it is)?: yes|even: yes)\b.* rounds?\b", sure
        )
        assert {"FP8 as you run it", "BF16 compiled"} <= {each.label for each in first.variants}
    if verdict.status == "fp8_slower":
        assert A_TIME.search(" ".join(found.why))
        assert first.fixes
    if verdict.basis == "modelled":
        assert re.search("stimates were up to .+ off|the estimate may be off by", found.sure)
    if verdict.basis is None:
        assert not first.variants


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("ascii", [False, True])
def test_the_widest_screen_is_a_table_in_every_width(width: int, ascii: bool) -> None:
    first = of("checkpointed_needlessly")
    screen = draw(first, width=width, colour=False, ascii=ascii)
    assert max(map(columns, without_code(first, screen))) <= width
    fill = FILLS["matmul"][ascii]
    lines = screen.splitlines()
    start = next(at for at, line in enumerate(lines, 1) if line.startswith("ms/step"))
    rows = lines[start : start + len(first.variants)]
    assert [row.split("  ")[0] for row in rows] == [each.label for each in first.variants]
    assert sum(fill * 2 in row for row in rows) == 3
    assert screen.isascii() == ascii


@pytest.mark.slow
def test_colour_says_nothing_that_the_text_does_not() -> None:
    first = of("vit")
    plain = draw(first, width=80, colour=False, ascii=False)
    coloured = draw(first, width=80, colour=True, ascii=False)
    assert re.sub(r"\x1b\[[\d;]*m", "", coloured) == plain
    assert coloured != plain
    fills = [fill for fill, _, _ in FILLS.values()]
    letters = [letter for _, letter, _ in FILLS.values()]
    assert len(set(fills)) == len(set(letters)) == len(FILLS)


def test_a_ratio_is_that_of_two_times_on_the_screen() -> None:
    first = first_screen(diagnose(timed(DECODER_468M, FP8_EAGER, BF16, FP8_COMPILED)))
    times = {each.label: float(each.step) for each in first.variants}
    told = {each.label: each.speed for each in first.variants}
    best = times["BF16 compiled"]
    assert told == {
        label: "1x" if label == "BF16 compiled" else f"{best / ms:.2f}x" for label, ms in times.items()
    }


def test_the_parts_of_a_difference_add_up() -> None:
    found = first_screen(diagnose(timed(DECODER_468M, FP8_EAGER, BF16, FP8_COMPILED))).difference
    assert found is not None
    assert f"{sum(each.ms for each in found.changes):,.1f} ms" in found.title


def test_a_timing_that_is_too_noisy_gives_no_ratio() -> None:
    noisy = replace(
        FP8_EAGER, step_ms=90.0, rounds_ms=(40.0, 80.0, 90.0, 100.0, 400.0), low_ms=40.0, high_ms=400.0
    )
    steady = replace(
        BF16, step_ms=100.0, rounds_ms=(60.0, 90.0, 100.0, 110.0, 300.0), low_ms=60.0, high_ms=300.0
    )
    report = diagnose(timed(DECODER_468M, noisy, steady))
    assert report.verdict.status == "too_noisy"
    first = first_screen(report)
    assert {each.label: each.speed for each in first.variants} == {
        "BF16 compiled": "1x",
        "FP8 as you run it": "noisy",
    }
    assert first.answer.sure.startswith("No: ")
    assert not re.search(r"\dx\b", first.answer.what + first.answer.numbers)


@pytest.mark.slow
def test_what_is_only_information_is_one_line() -> None:
    first = of("llama_8b_lora_r8")
    assert first.notes.startswith("2 notes: ")
    assert first.notices == ()


def test_with_v_everything_stands_below() -> None:
    name = "eager_decoder"
    brief, whole = text.render(SCREENS[name]), text.render(SCREENS[name], verbose=True)
    assert whole.startswith(brief[: brief.index("\nFix 1")].rstrip())
    assert SCREENS[name].findings[0].explanation.split(":")[0] in " ".join(whole.split())


def test_names_of_variants_are_told_once() -> None:
    labels = [each.label for each in of("decoder_468m").variants]
    assert len(labels) == len(set(labels))
    assert ArmName.AS_IS not in labels


def test_the_plan_of_a_job_that_is_not_slower_says_what_it_mends() -> None:
    found = of("graph_breaks").answer
    assert found.why[0].startswith("FP8 takes 1.0 ms/step less: matmuls −24.3, casts +22.0")
    assert found.why[1].startswith("Compiled blocks run in pieces")


def test_a_fix_that_was_timed_and_saves_nothing_is_in_no_plan() -> None:
    first = of("narrow_head")
    assert first.fixes == ()
    report = load_report(RECORDED[0].with_name("h200-narrow_head.json.gz"))
    assert "SHP004" in {each.code for each in report.findings}
    assert first.answer.fix == ("Nothing to change.",)
    assert first.answer.then.sentence.startswith("As it is: 41.4 ms")


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [
        (0.1, 1.8, "saves 0.1 to 1.8 ms/step, measured"),
        (-9.7, 15.6, "too noisy to tell: from 16 ms/step less to 9.7 ms/step more, measured"),
        (-2.0, -1.0, "costs 1.0 to 2.0 ms/step, measured"),
        (-0.01, 0.02, "saves 0.0 ms/step, measured"),
    ],
)
def test_a_saving_that_may_be_none_is_called_noise(low: float, high: float, words: str) -> None:
    assert saves(Saving(low=low, high=high, basis="measured", gpu="NVIDIA H200")) == words


OVERWRITTEN = (
    "it raises RuntimeError: Error: accessing tensor output of CUDAGraphs that has been overwritten by a "
    "subsequent run. Stack trace: [Could not find stack trace]. To prevent overwriting, clone the tensor "
    "outside of torch.compile() or call torch.compiler.cudagraph_mark_step_begin() before each invocation."
)
"""What BF16 of a BERT raised with CUDA graphs, on an H200."""


def test_of_a_long_message_the_first_screen_has_a_sentence_and_v_the_rest() -> None:
    arms = {"as_is": around(103.6), "bf16_compiled": around(92.7), "bf16_cuda_graphs": OVERWRITTEN}
    report = diagnose(Of(arms).facts())
    assert first_screen(report).untimed == (
        "Not timed: BF16, CUDA graphs (raises RuntimeError: Error: accessing tensor output of CUDAGraphs "
        "that has been overwritten by a subsequent run)."
    )
    assert "To prevent overwriting" in " ".join(render(report).split())


def test_a_fix_that_a_trial_left_out_says_so() -> None:
    asides = {each.code: each.aside for each in of("graph_breaks").fixes}
    assert asides["CMP003"].startswith("adapt these lines: ")
    assert asides["CMP003"].endswith("; not timed: fp8doctor cannot apply it")
    modelled = of("mlp").fixes
    assert not [each for each in modelled if "not timed" in each.aside], "no trial timed anything"


def test_the_end_names_the_form_of_bf16_that_it_is_held_to() -> None:
    """The box has the best BF16 of the step as it is too, which is slower."""
    arms = {
        "as_is": around(130.0),
        "bf16_compiled": around(119.6),
        "prescribed": (78.0, 92.0, 93.0, 103.0, 118.0, 92.0),
        "bf16_without_checkpointing": around(98.1),
    }
    told = first_screen(diagnose(Of(arms, treatments=("checkpointing-off",), bases={}).facts())).answer.then
    assert told.sentence.endswith("within noise of BF16 without checkpointing (98.1 ms).")


@pytest.mark.slow
def test_a_disturbed_host_is_no_fix_and_takes_the_certainty() -> None:
    said = first_screen(load_report(JOBS / "h100-whisper_medium.json.gz")).answer
    assert said.fix == ("Go back to BF16, compiled: the fastest FP8 that was timed takes 276.0 ms.",)
    assert said.sure.startswith("Slower: yes. How much: no, 5.9x to 6.8x in 5 rounds: the step waits for")


def test_what_was_not_timed_is_no_part_of_the_end() -> None:
    first = of("static_scale")
    assert len(first.fixes) == 2
    assert first.answer.then.sentence.startswith("With fix 2 alone: 53.8 ms")


def test_a_finding_names_the_fix_that_carries_it_out_before_that_of_its_cause() -> None:
    mended = {each.code: each.text for each in of("cannot_be_saved").notices}
    assert mended["DST001"].endswith("(gone with fix 1)")


def test_a_change_of_fp8_that_gained_by_itself_is_no_advice_beside_a_plan_in_bf16() -> None:
    report = load_report(RECORDED[0].with_name("h200-cannot_be_saved.json.gz"))
    told = {each.code: each.text for each in first_screen(report).notices}["SHP005"]
    assert told == "The recipe rowwise is 1.46x as fast as tensorwise (gone with fix 1)"


def test_a_finding_of_layers_that_leave_fp8_names_the_fix_that_takes_them_out() -> None:
    layer = DECODER_468M.network.linears[0]
    first = first_screen(
        diagnose(
            replace(
                DECODER_468M,
                network=replace(DECODER_468M.network, linears=(layer,)),
                workload=Workload(batch_source="given", batch_size=4, tokens=16384),
                trial=Trial(device="cpu", arms=(), rows={layer.name: (4,)}),
            )
        )
    )
    assert first.answer.what == "The training step raises"
    assert len(first.fixes) == 1
    mended = {each.code: each.text for each in first.notices}
    assert mended["CMP001"].endswith("(gone with fix 1)")


@pytest.mark.slow
def test_a_modelled_saving_of_a_gpu_is_not_held_to_the_step_of_a_cpu() -> None:
    as_is = ran("as_is", 200_000.0)
    there = first_screen(diagnose(timed(DECODER_468M, as_is)))
    here = first_screen(diagnose(timed(DECODER_468M, as_is, device="cpu")))
    assert "CMP001" in there.folded
    assert not here.folded
    assert [each.code for each in here.fixes] == ["CMP001"]


def test_layers_that_the_conversion_keeps_from_learning_do_so_without_it() -> None:
    first = of("accelerate_eager")
    assert [each.code for each in first.fixes] == ["MOD007"]
    stays, instead = first.answer.fix
    assert stays == "Go back to BF16, compiled: FP8 pays off for none of these shapes."
    assert instead.startswith("For FP8 instead: switch FSDP's float8 all-gather off")
    assert first.answer.then.sentence.startswith("With this fix the layers train. ")
    assert first.answer.sure.startswith(
        "The fault: yes, it was read from the job itself. Slower in FP8 with every fix: likely, 0.58 to "
    )
    assert ". Time it on this GPU: " in first.answer.sure


def test_times_that_two_copies_do_not_bear_out_leave_what_was_read_as_sure_as_it_is() -> None:
    sure = of("gpt2_conv1d").answer.sure
    assert sure == (
        "The fault: yes, it was read from the job itself. FP8 is not faster: yes, by the upper bound of "
        "1.00x. The times may be off: two copies of one step differ by 6.6%."
    )


@pytest.mark.parametrize(
    ("job", "command"),
    [
        ("h200-fsdp2", "fp8doctor run --stop fsdp2.py ARGS..."),
        ("h200x2-ddp_torchao", "torchrun ... -m fp8doctor run --stop job.py ARGS..."),
    ],
)
def test_a_watched_script_is_not_told_to_run_as_it_just_did(job: str, command: str) -> None:
    report = watched(job)
    assert (report.next.command if report.next else "") in (command, "fp8doctor explain STP007")
    assert command in " ".join(first_screen(report).answer.fix)
    assert "on a GPU" not in " ".join(first_screen(report).next)


@pytest.mark.slow
def test_no_number_is_parted_from_its_unit() -> None:
    first = of("gpt2_conv1d")
    for width in range(40, 121):
        screen = draw(first, width=width, colour=False, ascii=False)
        assert not re.search(r"±\s*│?$|\d\s*│\n│\s+(?:%|ms)", screen, re.MULTILINE)


def test_a_column_without_a_value_and_a_bar_beside_nothing_are_left_out() -> None:
    report = watched("h200x2-ddp_slow_rank")
    screen = draw(first_screen(report), width=80, colour=False, ascii=False)
    assert "speed\n" not in screen.replace("  GiB", "")
    assert FILLS["not profiled"][0] not in screen
    assert view(report).steps is None


def test_times_of_a_single_round_are_shown_whole() -> None:
    """They have no spread, and its column is gone."""
    report = diagnose(timed(DECODER_468M, ran("as_is", 878.4), ran("bf16", 241.3)))
    screen = draw(first_screen(report), width=90, colour=False, ascii=False)
    assert re.search(r"BF16 +241\.3 ", screen)
    assert re.search(r"FP8 as you run it +878\.4 ", screen)


@pytest.mark.slow
def test_a_screen_draws_no_random_number() -> None:
    """In a process that had not imported what draws it, as a training's."""
    ask = """
        import random
        from pathlib import Path
        from fp8doctor import load_report
        report = load_report(Path("{path}"))
        random.seed(0)
        expected = random.getstate()
        assert "fp8doctor" in str(report)
        assert random.getstate() == expected
    """
    code = textwrap.dedent(ask.format(path=RECORDED[0]))
    subprocess.run([sys.executable, "-c", code], check=True, timeout=LONGEST_S)


def test_parts_that_cannot_be_relied_on_have_no_bar() -> None:
    assert FP8_EAGER.breakdown is not None
    unreliable = replace(FP8_EAGER, breakdown=replace(FP8_EAGER.breakdown, reliable=False))
    report = diagnose(timed(DECODER_468M, unreliable, BF16))
    assert [bool(each.parts) for each in first_screen(report).variants] == [True, False]
    steps = view(report).steps
    assert steps is not None
    assert [{part.kind for part in bar.segments} for bar in steps.bars] == [{"part"}, {"whole"}]


@pytest.mark.parametrize(
    ("patient", "basis"), [("accelerate_eager", "modelled"), ("decoder_468m", "measured")]
)
def test_an_end_is_green_where_it_was_measured(patient: str, basis: str) -> None:
    first = of(patient)
    assert (first.answer.tone, first.answer.then.basis) == ("bad", basis)
    drawn = draw(first, width=120, colour=True, ascii=False)
    line = next(each for each in drawn.splitlines() if "Then" in each)
    assert ("\x1b[32m" in line) == (basis == "measured")


def test_the_modelled_end_counts_the_tokens_that_the_plan_asks_for() -> None:
    first = first_screen(watched("h200x2-fsdp2_few_rows"))
    assert first.answer.then.sentence == (
        "With this fix: about 1.04x the speed of the best BF16 (estimated for H200), too uncertain to tell. "
        "No estimate of the gain over now: a step with more tokens is other work. Apply the fix, then time "
        "the step: torchrun ... -m fp8doctor run --stop job.py ARGS..."
    )


def test_what_an_earlier_window_timed_is_held_to_that_window_and_says_so() -> None:
    arms = (
        ran(ArmName.AS_IS, 60.0),
        ran(ArmName.BF16_COMPILED, 30.0),
        ran(ArmName.PRESCRIBED, 28.0, treatments=("recipe-rowwise", "keep-in-bf16"), base="as_is"),
        ran("as_is_first", 40.0),
        ran("bf16_compiled_first", 20.0),
        ran("recipe-rowwise", 25.0, treatments=("recipe-rowwise",), base="as_is_first"),
    )
    first = first_screen(diagnose(timed(DECODER_468M, *arms)))
    (earlier,) = (each for each in first.variants if each.ms == 25.0)
    assert earlier.speed == "0.80x"
    assert first.compared == f"Timed earlier, when BF16 compiled took 20.0 ms: {earlier.label}."
    assert not first_screen(diagnose(timed(DECODER_468M, *arms[:3]))).compared


def test_fixes_that_save_together_name_each_other_and_one_saving() -> None:
    (path,) = (each for each in RECORDED if name_of(each) == "h200-lora")
    report = load_report(path)
    first, second = report.prescription
    saving = Saving(low=326.0, high=327.0, basis="measured", from_ms=433.9, to_ms=107.3)
    steps = (
        replace(first, saving_ms=saving, together=(second.treatment.name,)),
        replace(second, saving_ms=None, together=(first.treatment.name,)),
    )
    planned = replace(report, prescription=steps)
    asides = [fix.aside for fix in first_screen(planned).fixes]
    assert asides == [
        "together with fix 2 saves 326.6 ms/step, from 433.9 to 107.3, measured",
        "its saving is counted in fix 1",
    ]
    assert [each.saving for each in details(planned).entries[:2]] == [
        "−327 ms/step, measured, together with fix 2",
        "together with fix 1",
    ]
