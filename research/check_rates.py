"""How often each check fired, rightly or not, and what it missed, on recordings, recipes and threads.

The tables of threads and recipes are generated too: `tests.refresh` writes them first.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from fp8doctor import load_report, registry
from fp8doctor.finding import Finding
from tests.clinic import Patient, patients
from tests.markdown import table
from tests.recordings import files

RESEARCH = Path(__file__).parent
TESTS = RESEARCH.parent / "tests"
CODE = re.compile(r"\b[A-Z]{3,4}\d{3}\b")
RECORDED = ("patients", "running")
"""Folders of ``tests/`` whose recordings were made of a patient's file, an example or a job."""


class Case(NamedTuple):
    """The codes that fired on a job, and those of which it is known that they should, or should not."""

    fired: list[str]
    expected: tuple[str, ...] = ()
    wrong: tuple[str, ...] = ()
    missed: tuple[str, ...] = ()


def rows_of(page: Path) -> Iterator[list[str]]:
    """Read the cells of each row of a page's tables."""
    for line in page.read_text("utf-8").splitlines():
        if line.startswith("| ") and not line.startswith("| ---"):
            yield [cell.strip() for cell in line.strip("|").split("|")]


def in_threads() -> Iterator[Case]:
    """Read the rebuilt threads of users."""
    from research.complaints.unseen import THREADS, name_of

    expected = {name_of(each): tuple(each.get("codes", ())) for each in THREADS}
    for cells in rows_of(RESEARCH / "complaints" / "unseen.md"):
        name = cells[0].strip("[").partition("]")[0]
        if name in expected and len(cells) == 5:
            yield thread(CODE.findall(cells[2]), expected[name], cells[4])
    for cells in rows_of(RESEARCH / "complaints" / "README.md"):
        if len(cells) == 7 and cells[0].startswith("["):
            yield thread(CODE.findall(cells[5]), tuple(CODE.findall(cells[4])), cells[6])


def thread(fired: list[str], expected: tuple[str, ...], outcome: str) -> Case:
    """Judge a thread: any expected code answers it, and a wrong answer is the first that a reader meets."""
    missed = () if {*expected} & {*fired} else expected
    return Case(fired, expected, tuple(fired[:1]) if outcome == "wrong" else (), missed)


def in_recordings() -> Iterator[Case]:
    """Judge what fires on each recording of a GPU by what its model file must and must not be told."""
    folders = (TESTS / "patients", RESEARCH / "patients")
    known = {each.path.name: each for folder in folders for each in patients(folder)}
    examples = {each.name for each in (TESTS.parent / "examples").glob("*.py")}
    for folder in RECORDED:
        for path in files(TESTS / folder / "recorded"):
            report = load_report(path)
            script = report.facts.get("target.name") or ""
            is_patient = folder == "patients" or script not in examples
            yield recording(report.findings, known.get(script) if is_patient else None)


def recording(findings: Sequence[Finding], patient: Patient | None) -> Case:
    """Judge by code, or by name if the patient names a rule."""
    fired = list(dict.fromkeys(each.code for each in findings))
    if patient is None:
        return Case(fired)
    codes = {each.name: each.code for each in registry.discover()}
    said = {*fired, *(each.name for each in findings)}
    wrong = tuple(codes.get(key, key) for key in patient.must_not if key in said)
    missed = tuple(codes.get(key, key) for key in patient.must if key not in said)
    return Case(fired, tuple(codes.get(key, key) for key in patient.must), wrong, missed)


def counted(cases: Iterable[Case]) -> tuple[int, dict[str, Counter[str]]]:
    """Count the cases, and by code how often it fired, rightly and wrongly, and was missed."""
    total, by_code = 0, dict[str, Counter[str]]()
    for total, case in enumerate(cases, 1):  # noqa: B007
        for code in case.fired:
            right = code in case.expected and code not in case.wrong
            judged = ["rightly"] if right else ["wrongly"] if code in case.wrong else []
            by_code.setdefault(code, Counter()).update(["fired", *judged])
        for code in case.missed:
            by_code.setdefault(code, Counter()).update(["missed"])
    return total, by_code


def in_recipes() -> tuple[int, dict[str, Counter[str]]]:
    """Count what warnings and errors did on public recipes; what they missed is not known."""
    from research.recipes.judged import JUDGED
    from research.recipes.replay import RECIPES

    names = {"rightly": ("fired", "rightly"), "false alarm": ("fired", "wrongly"), "not judged": ("fired",)}
    by_code: dict[str, Counter[str]] = {}
    for (_, code), (judgment, _) in JUDGED.items():
        by_code.setdefault(code, Counter()).update(names[judgment])
    return len(RECIPES), by_code


@cache
def columns() -> dict[str, tuple[int, dict[str, Counter[str]]]]:
    return {
        "recordings on GPUs": counted(in_recordings()),
        "public recipes": in_recipes(),
        "threads of users": counted(in_threads()),
    }


def rates(codes: Iterable[str]) -> str:
    """Write the table of all checks."""
    found, codes = columns(), list(codes)
    head = ("check", *(f"{total} {where}" for where, (total, _) in found.items()))
    rows = [
        (f"[{code}]({code}.md)", *(cell(by_code.get(code, Counter())) for _, by_code in found.values()))
        for code in codes
    ]
    sums = (sum((by_code.get(code, Counter()) for code in codes), Counter()) for _, by_code in found.values())
    return table(head, [*rows, ("all", *map(cell, sums))])


def cell(counts: Counter[str]) -> str:
    names = ("fired", "rightly", "wrongly", "missed")
    return ", ".join(f"{counts[name]} {name}" for name in names if counts[name])
