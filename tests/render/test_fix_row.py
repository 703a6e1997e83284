"""Fix and its promise name one end, one basis and whole commands on every recorded screen."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fp8doctor import registry
from fp8doctor.analysis.fp8_request import trains_in_16_bits
from fp8doctor.analysis.treatment_table import STAY_IN_BF16
from fp8doctor.diagnosis.dialects import from_table, tables
from fp8doctor.finding import Treatment
from fp8doctor.render.details import gains_nothing
from fp8doctor.render.screen import GAINS_NOTHING, Screen
from tests.diagnosis.test_plan_agrees import ALL, TESTS, replayed
from tests.recordings import files, name_of
from tests.test_recorded import RECORDED

PATHS = [*ALL, *files(TESTS / "sharded" / "recorded")]
EVERY = pytest.mark.parametrize("path", PATHS, ids=[f"{each.parts[-3]}-{name_of(each)}" for each in PATHS])


def rows(screen: Screen) -> str:
    return " ".join(each for _, lines in screen.answer.rows for each in lines)


@EVERY
def test_the_box_names_no_code_and_next_none_that_is_not_on_the_screen(path: Path) -> None:
    _, screen, _ = replayed(path)
    codes = {check.code for check in registry.discover()}
    typed = re.sub(r"fp8doctor explain \w+", "", rows(screen))
    assert not codes.intersection(re.findall(r"\b[A-Z]+\d{3}\b", typed))
    shown = {each.code for each in screen.fixes} | {each.code for each in screen.notices}
    explained = re.findall(r"fp8doctor explain (\w+)", " ".join(screen.next))
    assert set(explained) <= shown


@EVERY
def test_an_option_stands_in_its_whole_command(path: Path) -> None:
    _, screen, _ = replayed(path)
    for found in re.finditer(r"--budget \d+", rows(screen)):
        assert re.search(r"fp8doctor (run --stop )?$", rows(screen)[: found.start()])


@EVERY
def test_a_time_names_the_fixes_that_it_has(path: Path) -> None:
    """Fixes that are only estimated are in no sum with those that were timed, or that the model holds."""
    report, screen, _ = replayed(path)
    then, steps = screen.answer.then.sentence, report.prescription
    assert "without fix" not in then
    told = re.search(r"With fix(?:es)? ([\d and]+?)(?: alone)?: ", then)
    done = {int(n) for n in re.findall(r"\d+", told[1])} if told else set()
    for number, step in enumerate(steps, 1):
        saving = step.saving_ms
        if done and number not in done and saving and saving.basis == "modelled" and saving.high > 0:
            assert f"Fix {number} saves " in then


@EVERY
def test_what_the_trial_refuted_is_not_stated_as_a_fact(path: Path) -> None:
    report, screen, _ = replayed(path)
    for line in screen.notices:
        found = next((each for each in report.findings if each.code == line.code), None)
        if found and gains_nothing(found) and not re.search(r"\((fixed by|gone with) ", line.text):
            assert line.text.startswith(GAINS_NOTHING)


@EVERY
def test_lora_under_unsloth_is_promised_no_fp8(path: Path) -> None:
    report, screen, _ = replayed(path)
    if trains_in_16_bits(report.facts):
        assert "With FP8" not in rows(screen)
        assert "FP8 would run at" not in screen.answer.numbers
        assert not [step for step in report.prescription if step.treatment.name == "train-in-fp8"]
        assert "what FP8 would gain" not in rows(screen)


@EVERY
def test_a_job_that_is_not_in_bf16_does_not_stay_in_it(path: Path) -> None:
    report, screen, _ = replayed(path)
    fix = " ".join(screen.answer.fix)
    in_fp8 = any(each.use == "training" and each.engaged is not False for each in report.facts.linears())
    assert not (in_fp8 and "tay in BF16" in fix), fix
    assert not (not in_fp8 and "o back to BF16" in fix), fix


@EVERY
def test_no_fact_is_named_by_its_path_in_the_box(path: Path) -> None:
    _, screen, _ = replayed(path)
    assert not re.search(r"\b(network|training|environment|software|workload)\.\w+", rows(screen))


@pytest.mark.parametrize(
    ("job", "fix"),
    [
        ("backend_without_fp8", "Unset ACCELERATE_FP8_BACKEND and stay in BF16, compiled: "),
        ("backend_missing", "Train in BF16, compiled: "),
        ("full_gpu", "Free the GPU's memory first: the step needs about 0.5 of 140 GiB (estimated), "),
        ("emulated", "Convert without emulation."),
        ("fp32_matmul", "Run forward and loss under BF16 autocast, or convert no operand to fp32 "),
        ("unsloth_lora", "Stay in BF16."),
    ],
)
def test_the_advice_is_for_the_facts_of_the_job(job: str, fix: str) -> None:
    _, screen, _ = replayed(RECORDED / f"h200-{job}.json.gz")
    assert screen.answer.fix[0].startswith(fix)


@pytest.mark.parametrize("job", ["te_tiny", "te_checkpointed_inside"])
def test_layers_built_as_te_linear_have_no_conversion_to_leave_out(job: str) -> None:
    _, screen, _ = replayed(RECORDED / f"h200-{job}.json.gz")
    first = screen.fixes[0].lines.splitlines()[0]
    assert first == "# leave FP8 out: no te.autocast, and torch.nn.Linear in place of te.Linear"


@pytest.mark.parametrize("name", tables())
def test_a_fix_that_ends_in_bf16_is_called_so(name: str) -> None:
    for treatment in tables()[name].get("in_bf16", {}):
        told = from_table(name, Treatment(name=treatment, summary="convert", code="pass"))
        assert told.name == STAY_IN_BF16
        assert "BF16" in told.summary


@EVERY
def test_nobody_is_promised_that_a_job_runs_to_its_end(path: Path) -> None:
    _, screen, _ = replayed(path)
    assert "runs to its end" not in rows(screen)
