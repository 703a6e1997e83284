"""Replay ``unseen_engines.toml``: ``python -m research.complaints.unseen_engines`` writes the results."""

from __future__ import annotations

import json
import re
import tempfile
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from research.complaints import unseen_engines_jobs
from research.complaints.replay import codes_in_order
from research.complaints.unseen import MARK, asked, explained, misses, name_of, section
from tests.looked import looked

HERE = Path(__file__).parent
PAGE = HERE / "unseen_engines.md"
THREADS: list[dict[str, Any]] = tomllib.loads((HERE / "unseen_engines.toml").read_text("utf-8"))["thread"]
OUTCOMES = ("right", "not first", "open", "wrong", "reassuring")


def answer(thread: dict[str, Any]) -> tuple[str, str]:
    """Replay one thread: the codes in the order of reading, or the command, and the outcome."""
    if "text" in thread:
        outcome = explained(thread)[2]
        return "explain", "open" if outcome == "silent" else outcome
    if "plan" in thread:
        return "plan", _planned(thread)
    with pytest.MonkeyPatch.context() as patch:
        job = getattr(unseen_engines_jobs, thread["build"])(patch)
        try:
            report = looked(job.model, job.batch, optimizer=job.optimizer, assume_gpu=thread["gpu"])
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
    found = tuple(filter(None, codes_in_order(report)))
    said = " ".join(found) or "none"
    if not thread["codes"]:  # the question is how much
        return said, "right" if re.search(thread["must"], report.verdict.summary) else _of(report)
    named = [
        each.code
        for each in report.findings
        if each.code in thread["codes"]
        and re.search(thread["must"], f"{each.title} {each.explanation} {_fix_of(each)}", re.I)
    ]
    if named:
        return said, "right" if codes_in_order(report)[0] in named else "not first"
    return said, _of(report)


def _fix_of(finding: Any) -> str:
    return finding.treatment.summary if finding.treatment else ""


def _of(report: Any) -> str:
    """Judge an answer that does not name the cause."""
    if report.prescription or report.verdict.status == "no_fp8" or report.worst() not in (None, "info"):
        return "wrong"
    return "reassuring" if report.verdict.status == "fp8_faster" else "open"


def _planned(thread: dict[str, Any]) -> str:
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.json"
        config.write_text(json.dumps(thread["config"]), encoding="utf-8")
        printed = asked("plan", str(config), *thread["plan"])
    advice = next(part for part in printed.split("\n\n") if part.startswith("On "))
    good = re.search(thread["must"], advice) and not re.search(thread["never"], advice, re.I)
    return "right" if good else "wrong"


def row(thread: dict[str, Any]) -> tuple[str, ...]:
    said, outcome = answer(thread)
    return (f"[{name_of(thread)}]({thread['url']})", thread["cause"], said, thread["first"], outcome)


if __name__ == "__main__":
    rule = PAGE.read_text("utf-8").partition(MARK)[0]
    rows = [row(each) for each in THREADS]
    PAGE.write_text(rule + section(rows, OUTCOMES) + misses(THREADS), encoding="utf-8")
