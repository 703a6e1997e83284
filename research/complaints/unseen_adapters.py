"""``unseen_adapters.toml`` replayed: ``python -m research.complaints.unseen_adapters`` writes the results.

The first screen is judged as it is read: what its box names, and what it tells to write.
"""

from __future__ import annotations

import json
import re
import tempfile
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
from accelerate.state import AcceleratorState, GradientState

from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.facts import Gpu
from fp8doctor.render.text import render
from fp8doctor.report import Report
from research.complaints import unseen_adapters_jobs as jobs
from research.complaints.unseen import MARK, asked, misses, name_of
from tests.looked import looked
from tests.markdown import table

HERE = Path(__file__).parent
PAGE = HERE / "unseen_adapters.md"
THREADS: list[dict[str, Any]] = tomllib.loads((HERE / "unseen_adapters.toml").read_text("utf-8"))["thread"]
OUTCOMES = ("right", "not first", "open", "wrong", "reassuring", "harmful")

REASSURES = re.compile(r"✓ (FP8|No FP8)|Nothing found|\d\.\d\dx \(\d")
OPEN = re.compile(r"Open: |there is no estimate|has none of the")
SELDOM = {"memory_used_gib": 0.3, "other_processes": 0, "visible": True, "vendor": "nvidia"}


def printed(thread: dict[str, Any]) -> str:
    """What the thread's user would read."""
    if "text" in thread:
        return asked("explain", "-", text=thread["text"])
    if "plan" in thread:
        with tempfile.TemporaryDirectory() as folder:
            config = Path(folder) / "config.json"
            config.write_text(json.dumps(jobs.CONFIGS[thread["config"]]), encoding="utf-8")
            return asked("plan", str(config), *thread["plan"])
    with pytest.MonkeyPatch.context() as patch:
        job = getattr(jobs, thread["build"])(patch)
        try:
            report = looked(
                job.model,
                job.batch,
                optimizer=job.optimizer,
                autocast=job.autocast,
                assume_gpu=thread.get("gpu"),
            )
            if "card" in thread:  # as NVML would describe it
                gpu = Gpu(**thread["card"], **SELDOM)
                report = Report.of(diagnose(msgspec.structs.replace(report.facts, gpus=(gpu,))))
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()
    return render(report)


def first_of(text: str) -> tuple[str, str]:
    """Return what is read first, and the lines to write."""
    if "╭" in text:
        box, _, rest = text.partition("╭")[2].partition("╯")
        return re.sub(r"\s*│\s*", " ", box), rest.partition("\nMemory")[0]
    if "plan for" in text:
        return " ".join(text.partition("plan for")[2].split("\n\n")[1].split()), ""
    first = re.split(r"\nSource: ", text)[0]
    return " ".join(first.split()), first.partition("What to do.")[2]


def outcome(thread: dict[str, Any], text: str) -> str:
    first, lines = first_of(text)
    if "never" in thread and re.search(thread["never"], lines):
        return "harmful"
    if re.search(thread["must"], first):
        return "right"
    if re.search(thread["must"], " ".join(text.split())):
        return "not first"
    return "open" if OPEN.search(first) else "reassuring" if REASSURES.search(first) else "wrong"


def row(thread: dict[str, Any]) -> tuple[str, ...]:
    now = outcome(thread, printed(thread))
    return (f"[{name_of(thread)}]({thread['url']})", thread["cause"], thread["first"], now)


def section(rows: list[tuple[str, ...]]) -> str:
    """How often each outcome came in the first run and comes now, and thread by thread."""
    counts = [Counter(each[at] for each in rows) for at in (2, 3)]
    totals = [
        (said, *(str(count[each]) for each in OUTCOMES))
        for said, count in zip(("first run (held-out)", "now"), counts, strict=True)
    ]
    head = ("thread", "true cause", "first run", "now")
    return f"{MARK}\n{table(('', *OUTCOMES), totals)}\n{table(head, rows)}"


if __name__ == "__main__":
    rule = PAGE.read_text("utf-8").partition(MARK)[0]
    PAGE.write_text(rule + section(list(map(row, THREADS))) + misses(THREADS), encoding="utf-8")
