"""The forty unseen threads replayed: ``python -m research.complaints.unseen`` writes the results."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from click.testing import CliRunner

from fp8doctor.cli.commands import main as command
from fp8doctor.render.text import render
from research.complaints import unseen_jobs
from research.complaints.replay import codes_in_order
from tests.looked import looked
from tests.markdown import table

HERE = Path(__file__).parent
PAGE = HERE / "unseen.md"
MARK = "## The outcomes\n"
THREADS: list[dict[str, Any]] = tomllib.loads((HERE / "unseen.toml").read_text("utf-8"))["thread"]
OUTCOMES = ("right", "not first", "silent", "wrong", "reassuring")
REASSURES = re.compile(r"Nothing to change|No check found anything to change. Open: how fast it")


def asked(*words: str, text: str | None = None) -> str:
    """What the command line prints."""
    return CliRunner().invoke(command, [*words], input=text).output


def answer(thread: dict[str, Any]) -> tuple[str, tuple[str, ...], str]:
    """Replay one thread: what is printed, the codes in the order of reading, and the outcome."""
    if "text" in thread:
        return explained(thread)
    with pytest.MonkeyPatch.context() as patch:
        job = getattr(unseen_jobs, thread["build"])(patch)
        try:
            report = looked(
                job.model,
                job.batch,
                optimizer=job.optimizer,
                assume_gpu=thread["gpu"],
            )
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
    printed, found = render(report), codes_in_order(report)
    named = [
        each.code
        for each in report.findings
        if each.code in thread["codes"]
        and re.search(thread["must"], f"{each.title} {each.explanation}", re.I)
    ]
    if named:
        return printed, found, "right" if found[0] in named else "not first"
    if report.prescription or report.worst() not in (None, "info"):
        return printed, found, "wrong"
    return printed, found, _of_words(thread | {"must": r"(?!)"}, printed, answered=False)


def explained(thread: dict[str, Any]) -> tuple[str, tuple[str, ...], str]:
    """Judge ``explain``: the first message has to name the cause; one that only shares a name is silence."""
    printed = asked("explain", "-", text=thread["text"])
    related = "does not know" in printed or "has none of the" in printed
    first, *_ = re.split(r"\nSource: |\nAlso in this text", printed)
    if related:
        return printed, (), "silent"
    if re.search(thread["must"], first, re.I):
        return printed, (), "right"
    return printed, (), _of_words(thread, printed, answered=True)


def _of_words(thread: dict[str, Any], printed: str, answered: bool) -> str:
    if re.search(thread["must"], printed, re.I):
        return "not first" if answered else "right"
    if answered:
        return "wrong"
    return "reassuring" if REASSURES.search(printed) else "silent"


def name_of(thread: dict[str, Any]) -> str:
    """Name a thread as GitHub does: ``ao#1102``."""
    repository, _, number = thread["url"].split("/")[-3:]
    return f"{repository}#{number}"


def row(thread: dict[str, Any]) -> tuple[str, ...]:
    _, found, outcome = answer(thread)
    said = " ".join(found) or ("explain" if "text" in thread else "none")
    return (f"[{name_of(thread)}]({thread['url']})", thread["cause"], said, thread["first"], outcome)


def misses(threads: Sequence[dict[str, Any]] = THREADS) -> str:
    """Why each thread was missed in the first run."""
    rows = [(name_of(each), each["first"], each["why"]) for each in threads if "why" in each]
    return f"\n## Every miss of the first run\n\n{table(('thread', 'outcome', 'why'), rows)}"


def section(rows: list[tuple[str, ...]], outcomes: Sequence[str] = OUTCOMES) -> str:
    """How often each outcome came in the first run and comes now, and thread by thread."""
    counts = [Counter(each[at] for each in rows) for at in (3, 4)]
    totals = [
        (said, *(str(count[each]) for each in outcomes))
        for said, count in zip(("first run (held-out)", "now"), counts, strict=True)
    ]
    head = ("thread", "true cause", "found, the first first", "first run", "now")
    return f"{MARK}\n{table(('', *outcomes), totals)}\n{table(head, rows)}"


if __name__ == "__main__":
    rule = PAGE.read_text("utf-8").partition(MARK)[0]
    PAGE.write_text(rule + section(list(map(row, THREADS))) + misses(), encoding="utf-8")
