"""Replay ``unseen_mixed.toml``: ``python -m research.complaints.unseen_mixed`` writes the results."""

from __future__ import annotations

import json
import tempfile
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest
import torch.distributed as dist

from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.facts import Gpu
from fp8doctor.render.text import render
from fp8doctor.report import Report
from research.complaints import unseen_mixed_jobs as jobs
from research.complaints.replay import codes_in_order
from research.complaints.unseen import MARK, asked, misses, name_of, section
from research.complaints.unseen_adapters import OUTCOMES, SELDOM
from research.complaints.unseen_adapters import outcome as outcome_of
from tests.looked import looked
from tests.stand_ins.accelerate_state import forget

HERE = Path(__file__).parent
PAGE = HERE / "unseen_mixed.md"
THREADS: list[dict[str, Any]] = tomllib.loads((HERE / "unseen_mixed.toml").read_text("utf-8"))["thread"]


def answer(thread: dict[str, Any], jobs: ModuleType = jobs) -> tuple[str, str, str]:
    """Replay one thread: what is printed, the codes in the order of reading, and the outcome."""
    if "build" not in thread:
        printed, said = commanded(thread)
        return printed, said, outcome_of(thread, printed)
    report = replayed(thread, jobs)
    printed, found = render(report), [*filter(None, codes_in_order(report))]
    outcome = outcome_of(thread, printed)
    if outcome == "right" and not set(found[:1]) <= set(thread.get("codes", found)):
        outcome = "not first"
    return printed, " ".join(found) or "none", outcome


def commanded(thread: dict[str, Any]) -> tuple[str, str]:
    """What the command prints, and its name."""
    if "text" in thread:
        return asked("explain", "-", text=thread["text"]), "explain"
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.json"
        config.write_text(json.dumps(thread["config"]), encoding="utf-8")
        return asked("plan", str(config), *thread["plan"]), "plan"


def replayed(thread: dict[str, Any], jobs: ModuleType) -> Report:
    with pytest.MonkeyPatch.context() as patch:
        job = getattr(jobs, thread["build"])(patch)
        try:
            report = looked(
                job.model,
                job.batch,
                autocast=job.autocast,
                accumulate=job.accumulate,
                assume_gpu=thread.get("gpu"),
            )
        finally:
            forget()
            if dist.is_initialized():
                dist.destroy_process_group()
    if "card" in thread:  # as NVML would describe it
        gpu = Gpu(**thread["card"], **SELDOM)
        return Report.of(diagnose(msgspec.structs.replace(report.facts, gpus=(gpu,))))
    return report


def row(thread: dict[str, Any], jobs: ModuleType = jobs) -> tuple[str, ...]:
    _, said, outcome = answer(thread, jobs)
    return (f"[{name_of(thread)}]({thread['url']})", thread["cause"], said, thread["first"], outcome)


if __name__ == "__main__":
    rule = PAGE.read_text("utf-8").partition(MARK)[0]
    rows = [row(each) for each in THREADS]
    PAGE.write_text(rule + section(rows, OUTCOMES) + misses(THREADS), encoding="utf-8")
