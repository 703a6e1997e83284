"""How often each check fired and was right, counted from the tables of this repository.

The tables of recordings, threads and recipes are generated too: `tests.refresh` writes them first.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from fp8doctor import headings, registry
from tests.clinic import patients
from tests.markdown import table

TESTS = Path(__file__).parent
CODE = re.compile(r"\b[A-Z]{3,4}\d{3}\b")
HEAD = ("where", "fired", "right", "wrong", "not judged")
RECORDED = ("patients", "running")
"""Folders of ``tests/`` whose ``recorded/README.md`` lists the codes of each recording."""

Judged = tuple[str, str]
"""A code that fired, and ``right``, ``wrong`` or ``not judged``."""


def rows_of(page: Path) -> Iterator[list[str]]:
    """Read the cells of each row of a page's tables."""
    for line in page.read_text("utf-8").splitlines():
        if line.startswith("| ") and not line.startswith("| ---"):
            yield [cell.strip() for cell in line.strip("|").split("|")]


def in_threads() -> Iterator[list[Judged]]:
    """Judge what fired on each rebuilt thread: right if it may name the cause, wrong if it misled."""
    from tests.complaints.unseen import THREADS, name_of

    expected = {name_of(each): each["codes"] for each in THREADS if "codes" in each}
    for cells in rows_of(TESTS / "complaints" / "unseen.md"):
        name = cells[0].strip("[").partition("]")[0]
        if name in expected and len(cells) == 5:
            yield judged(CODE.findall(cells[2]), expected[name], cells[4])
    for cells in rows_of(TESTS / "complaints" / "README.md"):
        if len(cells) == 7 and cells[0].startswith("["):
            yield judged(CODE.findall(cells[5]), CODE.findall(cells[4]), cells[6])


def judged(found: list[str], expected: list[str], outcome: str) -> list[Judged]:
    """Judge the codes of a thread, in the order in which a reader meets them."""
    verdicts = ["right" if each in expected else "not judged" for each in found]
    if outcome == "wrong":
        verdicts[:1] = ["wrong"]
    return list(zip(found, verdicts, strict=True))


def in_recordings() -> Iterator[list[Judged]]:
    """Judge what fires on each recording of a GPU by what its model file must and must not be told."""
    known = {
        each.path.stem: each
        for folder in (TESTS / "patients", TESTS / "patients" / "gpu")
        for each in patients(folder)
    }
    codes = {each.name: each.code for each in registry.discover()}
    for folder in RECORDED:
        page = TESTS / folder / "recorded" / "README.md"
        for cells in rows_of(page) if page.exists() else ():
            patient = known.get(cells[0].partition("-")[2])
            if len(cells) == 9 and cells[0] != "recording":
                must, must_not = (patient.must, patient.must_not) if patient else ((), ())
                must = tuple(codes.get(each, each) for each in must)
                yield [
                    (code, "right" if code in must else "wrong" if code in must_not else "not judged")
                    for code in CODE.findall(cells[8])
                ]


@functools.cache
def counts() -> dict[str, tuple[int, dict[str, Counter[str]]]]:
    """Count the verdicts of each code, by where it fired, with the number of cases."""
    found = {}
    for where, cases in (("threads of users", in_threads()), ("recordings on GPUs", in_recordings())):
        by_code: dict[str, Counter[str]] = {}
        of_all = list(cases)
        for code, verdict in (each for case in of_all for each in case):
            by_code.setdefault(code, Counter())[verdict] += 1
        found[where] = (len(of_all), by_code)
    return found


def rates(code: str) -> str:
    """Write the table of one check."""
    rows = []
    for where, (total, by_code) in counts().items():
        of = by_code.get(code, Counter())
        rows.append((f"{total} {where}", of.total(), *(of[each] for each in HEAD[2:])))
    known = headings.counts()
    if check := known["checks"].get(code):
        told = (check["fired"], check["rightly"], check["false_alarm"], check["not_judged"])
        rows.append((f"{known['recipes']} public recipes", *told))
    return table(HEAD, [tuple(map(str, each)) for each in rows]).rstrip()
