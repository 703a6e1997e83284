"""Trials in threads of one process: one after the other, and nothing is left behind."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
from torch import nn

from fp8doctor.stacks.looking import lineage

THREADS = """
import json, os, threading
before = dict(os.environ)
import torch
from torch import nn
from fp8doctor import inspect_model

model, x = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), torch.randn(8, 32)
model(x).sum().backward()
gradients = [each.grad for each in model.parameters()]
running, most, found = [], [], []

def step(copied, batch):
    running.append(threading.get_ident())
    most.append(len(set(running[-2:])))
    return copied(batch).pow(2).mean()

def inspect():
    report = inspect_model(model, x, training_step=step, device="cpu", budget_s=0.5)
    found.append(report.facts)

threads = [threading.Thread(target=inspect) for _ in range(3)]
for each in threads:
    each.start()
for each in threads:
    each.join()
print(json.dumps({
    "kept": all(each.grad is kept for each, kept in zip(model.parameters(), gradients)),
    "harm": [each.trial.harm for each in found],
    "tried": [each.trial.arms[0].tried for each in found],
    "seen": [each.training.gradients_seen for each in found],
    "gaps": sorted({each.trial.gaps["trial.arms.breakdown"] for each in found}),
    "taking turns": most.count(2),
    "variables": {name: text for name, text in os.environ.items() if before.get(name) != text},
}))
"""


@pytest.mark.slow
def test_trials_in_threads_take_turns_and_leave_nothing(tmp_path: Path) -> None:
    variables = {name: text for name, text in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"}
    variables |= {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", THREADS],
        cwd=tmp_path,
        env=variables,
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    said = [line for line in done.stderr.splitlines() if "Execution Trace Observer" not in line]
    assert said == [], "beside two lines of torch's observer, which serves as proof without the profiler"
    assert json.loads(done.stdout) == {
        "kept": True,
        "harm": [[], [], []],
        "tried": [True, True, True],
        "seen": [True, True, True],
        "gaps": ["torch's profiler works in the main thread only"],
        "taking turns": 2,
        "variables": {},
    }


def test_a_class_that_was_looked_at_is_let_go() -> None:
    kind = type("Gone", (nn.Module,), {})
    assert lineage(kind)[0][1] == "Gone"
    gone = weakref.ref(kind)
    del kind
    gc.collect()
    assert gone() is None
