"""What holds of every report's box and screen, in every format."""

import math
import re
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec import Struct

from fp8doctor import registry
from fp8doctor.analysis.memory import Fit
from fp8doctor.analysis.treatment_table import STAY_IN_BF16
from fp8doctor.answer.record import REST_SHARE
from fp8doctor.facts import if_recorded, recorded
from fp8doctor.render import text
from fp8doctor.render.page import Marks, Next
from fp8doctor.render.report_page import page
from fp8doctor.report import Report
from tests.render.every_format import CELL
from tests.render.sound_html import hold_sound
from tests.replays import Replay
from tests.sound_times import timed_pairs

EXPLAIN = re.compile(r"fp8doctor explain ((?:[A-Z]{3,5}\d{3} ?)+)")


def hold_screen(found: Replay, width: int) -> None:
    every_format_is_sound(found, width)
    a_screen_agrees_with_itself(found)
    numbers_of_the_box_are_those_of_the_answer(found)


def every_format_is_sound(found: Replay, width: int) -> None:
    report = found.report
    code = {line.strip() for each in snippets(report) for line in each.splitlines()}
    plain, verbose = (
        text.render(report, width=width),
        text.render(report, width=width, verbose=True, ascii=True),
    )
    lines = [line for line in f"{plain}{verbose}".splitlines() if line.strip() not in code]
    assert not [line for line in lines if len(line) > width or line != line.rstrip()]
    assert verbose.isascii()
    page, tables = report.to_html(), report.to_markdown()
    hold_sound(page)
    for table in re.findall(r"(?m)(?:^\|.*\|$\n?)+", tables):
        assert len({len(CELL.split(line)) for line in table.splitlines()}) == 1, table
    shown = {f"{ms:,.1f}" for pair in timed_pairs(report) for ms in pair}
    assert not [(ms, each[:40]) for ms in shown for each in (plain, verbose, page, tables) if ms not in each]


def snippets(report: Report) -> Iterator[str]:
    findings: Any = (*report.findings, *report.prescription)
    yield from (each.treatment.code for each in findings if each.treatment)


NUMBER = re.compile(r"(?<![\w.,])\d[\d,]*(?:\.\d+)?")


def numbers_of_the_box_are_those_of_the_answer(found: Replay) -> None:
    """None is computed in a sentence, and the named parts add up to the difference, but for a small rest."""
    said, lines = found.report.answer, [*found.box.lines]
    known = {str(number) for number in range(1, len(said.fixes) + 1)}
    known.update(*(_written(each) for each in _leaves(said)))
    printed = {
        number for each in lines if each.template != "why.parts" for number in NUMBER.findall(each.text)
    }
    assert printed <= known
    for each in (each for each in lines if each.template == "why.parts"):
        signs = re.findall(r"([+−])([\d,]+\.\d)", each.text)
        parts = [float(ms.replace(",", "")) * (-1 if sign == "−" else 1) for sign, ms in signs]
        small = REST_SHARE * max(map(abs, parts)) + 0.05 * (len(parts) + 2)
        assert sum(parts) == pytest.approx(sum(said.compared.parts_ms.values()), abs=small)


def _leaves(of: Any) -> Iterator[Any]:
    """List what a record holds, down to its numbers and words."""
    if isinstance(of, Fit):
        yield of.sentence
    elif isinstance(of, Struct):
        yield from _leaves([if_recorded(getattr, of, name) for name in of.__struct_fields__])
    elif isinstance(of, dict | list | tuple):
        for each in of.values() if isinstance(of, dict) else of:
            yield from _leaves(each)
    else:
        yield of


def _written(leaf: Any) -> set[str]:
    """Write a number in every form that a sentence has for it."""
    if isinstance(leaf, str):
        return {*NUMBER.findall(leaf)}
    if not isinstance(leaf, int | float) or not leaf or not math.isfinite(leaf):
        return set()
    return {f"{each:,.{digits}f}" for each in (abs(leaf), 1 / abs(leaf)) for digits in (0, 1, 2)}


def a_screen_agrees_with_itself(found: Replay) -> None:
    report, view = found.report, found.view
    assert page(report, quiet=True).parts[0] == found.box
    ended = report.facts.ranks.processes if recorded(report.facts, "ranks") else ()
    errors = [each.error for each in ended if each.get("end") == "raised" and each.get("error")]
    assert all(each in (report.answer.fault.reason if report.answer.fault else "") for each in errors)
    questions = [each.text for each in found.box.lines if each.template == "open.question"]
    assert len(questions) == len(report.answer.open)
    assert sum(report.answer.command in each for each in questions if report.answer.command) <= 1
    assert (report.verdict.status != "open") or report.answer.open or report.answer.fault
    parts = found.page.parts
    shown = {each.code for part in parts if isinstance(part, Marks) for each in part.rows}
    told = " ".join(piece for part in parts if isinstance(part, Next) for piece in part.pieces)
    asked = {code for codes in EXPLAIN.findall(told) for code in codes.split()}
    causes = {each.code for each in report.answer.causes}
    grave = [each for each in report.findings if each.severity != "info" and each.treatment]
    assert asked <= shown | causes
    assert causes & {each.code for each in grave} <= shown | asked
    for step in report.prescription:
        if step.treatment.name == STAY_IN_BF16 and not step.code:  # else it heads what only FP8 has
            own = (each for each in grave if not each.caused_by and each.area != "memory")
            checks = [registry.check_of(each) for each in own]
            assert not any(each.changes_fp8 and not each.stays_in_bf16 for each in checks if each)
    known = {check.code for check in registry.discover()}
    assert {each.code for each in report.findings} <= known
    rows = [row for row in found.rows if row.speed.endswith("x")]
    ones = [row for row in rows if row.speed == "1x"]
    assert len(ones) <= 1
    assert not ones or ones[0].ms == view.bf16.ms.value
