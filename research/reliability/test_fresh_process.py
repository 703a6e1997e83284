"""A process in which no test ran is left with nothing that runs or lies around."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.trial.test_clean_runs import STACKS

pytestmark = pytest.mark.slow

FRESH = """
import json, os, sys, threading
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        return self.second(self.first(x).relu())

def left():
    tasks = os.listdir("/proc/self/task")
    links = (f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd"))
    return {
        "threads": [thread.name for thread in threading.enumerate()],
        "children": "".join(open(f"/proc/self/task/{task}/children").read() for task in tasks),
        "files": sorted(os.readlink(link) for link in links if os.path.isfile(link)),
        # The cache of torch's compiler stays, as after any torch.compile: the user's own run finds it.
        "folder": os.listdir(),
        "temporary": [name for name in os.listdir(os.environ["TMPDIR"]) if "torchinductor_" not in name],
        "environment": dict(os.environ),
    }

model = Net()
model.compile(backend="aot_eager")
loaded, before = set(sys.modules), left()
from fp8doctor import inspect_model
trial = inspect_model(model, torch.ones(4, 16), device="cpu", budget_s=1).facts.trial
after = left()
print(json.dumps({
    "proven": trial.arms[0].graphs_run, "harm": trial.harm,
    "left": {key: after[key] for key in after if after[key] != before[key]},
    "loaded": sorted({name.partition(".")[0] for name in set(sys.modules) - loaded}),
    "cuda": torch.cuda.is_initialized(),
}))
"""


def test_a_fresh_process_is_left_with_nothing_that_runs_or_lies_around(tmp_path: Path) -> None:
    for name in ("temporary", "here"):
        (tmp_path / name).mkdir()
    variables = {
        **os.environ,
        "TMPDIR": str(tmp_path / "temporary"),
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    done = subprocess.run(
        [sys.executable, "-c", FRESH],
        cwd=tmp_path / "here",
        env=variables,
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    found = json.loads(done.stdout)
    assert (found["proven"], found["harm"], found["left"], found["cuda"]) == (1, [], {}, False)
    assert STACKS.isdisjoint(found["loaded"])
