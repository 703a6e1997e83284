"""Helpers that run other code, the work that they are told, and how their processes stand."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8doctor.facts import Facts, Target, Workload
from fp8doctor.loading.job import Job
from fp8doctor.worker.ahead import Helpers

SMALL = Job(model=torch.nn.Linear(2, 2), target=Target(), workload=Workload())

ASKED: dict[str, Any] = {"target": "m.py", "batch": None, "seq": None, "trial": None}


def helpers(monkeypatch: pytest.MonkeyPatch, code: str, count: int = 1) -> Helpers:
    """Helpers that run other code, told to load."""
    monkeypatch.setattr(sys, "orig_argv", [sys.executable, "-c", f"import json, sys\n{code}", ""])
    of = Helpers(ASKED, count)
    of.load("cpu", None, count)
    return of


LOADED = "sys.stdin.readline(); print('ready', flush=True)"

EVERY = f"{LOADED}\nfor line in sys.stdin: print(json.loads(line)[1]['blocks'] / 2, flush=True)"
"""Compiles whatever it is told in half a second a block."""

LARGE = Facts(target=Target(kind="file", name="m" * 2**20))
"""More than a pipe holds."""

WORK = [("a", 1), ("a", 0), ("b", 1)]

CUTS = [{"blocks": 2}, {"blocks": 6}]


def named(name: str) -> Facts:
    return Facts(target=Target(kind="file", name=name))


BY_FACTS = f"{LOADED}\nfor line in sys.stdin: print(len(json.loads(line)[2]['target']['name']), flush=True)"
"""Compiles whatever it is told in as many seconds as the target's name has letters."""


FOREVER = "import time; time.sleep(1e6)"


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def is_alive(pid: int) -> bool:
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False
