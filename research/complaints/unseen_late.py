"""Replay ``unseen_late.toml``: ``python -m research.complaints.unseen_late`` writes the results."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from research.complaints import unseen_late_jobs as jobs
from research.complaints import unseen_mixed as mixed
from research.complaints.unseen import MARK, section
from research.complaints.unseen_adapters import OUTCOMES

HERE = Path(__file__).parent
PAGE = HERE / "unseen_late.md"
THREADS: list[dict[str, Any]] = tomllib.loads((HERE / "unseen_late.toml").read_text("utf-8"))["thread"]


def row(thread: dict[str, Any]) -> tuple[str, ...]:
    return mixed.row(thread, jobs)


if __name__ == "__main__":
    rule = PAGE.read_text("utf-8").partition(MARK)[0]
    PAGE.write_text(rule + section([*map(row, THREADS)], OUTCOMES), encoding="utf-8")
