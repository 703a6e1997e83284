"""A recorded screen that does not know says why, and which command finds out, in the box."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fp8doctor.analysis.treatment_table import STAY_IN_BF16
from fp8doctor.facts import recorded
from tests.diagnosis.test_plan_agrees import ALL, replayed
from tests.recordings import name_of

SINGLE = [path for path in ALL if path.parts[-3] != "running"]
EVERY = pytest.mark.parametrize("path", SINGLE, ids=[f"{each.parts[-3]}-{name_of(each)}" for each in SINGLE])

UNSURE = re.compile(r"^No\b|not sure|nothing was timed|undecided|too noisy|not known|unknown")
COMMAND = re.compile(r"fp8doctor (run |explain |trace )?[\w.-]+|--budget \d+")


def box(path: Path) -> str:
    _, screen, _ = replayed(path)
    return " ".join(sentence for _, row in screen.answer.rows for sentence in row)


@EVERY
def test_an_answer_that_is_not_sure_has_a_command(path: Path) -> None:
    _, screen, _ = replayed(path)
    if any(UNSURE.search(row) for _, rows in screen.answer.rows for row in rows):
        assert COMMAND.search(box(path)), box(path)


@EVERY
def test_a_job_without_times_says_why_it_has_none(path: Path) -> None:
    report, screen, _ = replayed(path)
    if "nothing was timed" in screen.answer.sure:
        tried = recorded(report.facts, "trial")
        assert ("could not time copies" if tried else "nothing was timed (it ran with --no-trial)") in (
            screen.answer.sure
        )


@EVERY
def test_an_estimate_names_the_state_that_it_is_of(path: Path) -> None:
    """Of a job in FP8 with a fix there are two: as it is, and with the fix."""
    report, screen, _ = replayed(path)
    said = screen.answer
    if screen.fixes and report.verdict.basis == "modelled" and report.verdict.status != "no_fp8":
        assert re.search(r"[Aa]s it is|with (the fix|all fixes)", said.sure), said.sure
    slower = re.search(r"about ([\d,.]+) to [\d,.]+ ms/step as it is, the best BF16 ([\d,.]+)", said.numbers)
    if slower and float(slower[1].replace(",", "")) > float(slower[2].replace(",", "")):
        assert "Slower as it is: likely" in said.sure


@EVERY
def test_faster_than_now_has_a_now_in_ms_or_none_is_known(path: Path) -> None:
    _, screen, _ = replayed(path)
    told = box(path)
    if "x faster than now" in told:
        assert re.search(r"[\d.] ms", f"{screen.answer.numbers} {told}")


@EVERY
def test_no_fix_compiles_what_is_compiled_or_calls_fp8_what_is_not(path: Path) -> None:
    """Blocks that the user compiles stay as they are; and what leads to FP8 trains in it."""
    report, _, view = replayed(path)
    blocks = report.facts.network.blocks if recorded(report.facts, "network") else ()
    compiled = blocks and all(each.get("compiled") == each.count for each in blocks)
    bf16 = view.end is None or not view.end.in_bf16 or view.end.arm.name == "bf16_compiled"
    without = {each.code for each in report.findings if each.severity != "info"} & {"CMP002", "CMP005"}
    if compiled and bf16 and not without:
        stays = [step.treatment.code for step in report.prescription if step.treatment.name == STAY_IN_BF16]
        assert not [code for code in stays if ".compile()" in code and "leave out your own" not in code]
    assert not re.search(r"To train in FP8: [^.]*train in BF16", told := box(path)), told


@EVERY
def test_an_interval_has_two_ends_and_an_estimate_says_which_fix_it_lacks(path: Path) -> None:
    _, screen, _ = replayed(path)
    said = screen.answer
    assert not re.search(r"(?<!to )\b\d+\.\dx (faster|slower) in \d+ rounds", said.sure)
    lone = [each.number for each in screen.fixes if each.aside.endswith("estimated for H200")]
    if "With all fixes" in said.then.sentence and len(screen.fixes) > len(lone) == 1:
        assert f"without fix {lone[0]}" in said.then.sentence
