"""A script under ``fp8doctor run`` does to the world what it does under Python: fp8doctor copies none of its
objects, runs none of its code again, keeps no batch and leaves nothing patched."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.running.forks import run

LOOP = """
import os, pickle, shutil, sqlite3, subprocess, sys, weakref
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(32, 32)

    def forward(self, x):
        self.asked()
        return self.a(x)

    def asked(self):
        pass

def batch():
    return torch.randn(8, 32)

{}
model = Net()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(25):
    x = batch()
    model(x).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    after(step)
print("fine")
"""

FINALIZER = """
import gc
gc.set_threshold(100, 2, 2)

class Scratch:
    def __init__(self, path):
        self.path = path
        os.mkdir(path)

    def __del__(self):
        shutil.rmtree(self.path, ignore_errors=True)

def after(step):
    assert os.path.exists("scratch"), step

own = Net.__init__
def build(self):
    own(self)
    self.scratch = Scratch("scratch")
Net.__init__ = build
"""
"""Deletes a folder with its object, which the collector finds soon if it is in a cycle."""

HELPER = """
helper = subprocess.Popen(
    [sys.executable, "-uc", "import sys\\nfor n, _ in enumerate(sys.stdin): print(n)"],
    stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
)

def asked(self):
    helper.stdin.write("query\\n")
    self.last = int(helper.stdout.readline())

def after(step):
    assert model.last == step, (model.last, step)

Net.asked = asked
"""
"""Asks another process over a pipe."""

ROWS = """
forks = []
os.register_at_fork(before=lambda: forks.append(1))
rows = sqlite3.connect("rows", isolation_level=None)
rows.execute("create table seen (n int)")

def asked(self):
    rows.execute("insert into seen values (1)")
    with open("log", "a") as log:
        log.write("asked\\n")

def after(step):
    (seen,) = rows.execute("select count(*) from seen").fetchone()
    logged = len(open("log").readlines())
    assert (seen, logged, forks) == (step + 1, step + 1, []), (step, seen, logged, forks)

Net.asked = asked
"""
"""Writes into a database and a log."""

SLOT = """
free = [True]

def batch():
    assert free.pop(), "the batch before was never released"
    x = torch.randn(8, 32)
    weakref.finalize(x, free.append, True)
    return x

def after(step):
    global x
    del x
    assert free, step
"""
"""A ring buffer of one slot."""

PATCHED = """
own = pickle.dumps(torch.autograd.backward), dict(vars(Net)), vars(nn.Linear).copy()

def after(step):
    assert pickle.dumps(torch.autograd.backward) == own[0], step
    if step > 20:
        assert (dict(vars(Net)), vars(nn.Linear).copy()) == own[1:], step
        assert torch.autograd.backward.__code__.co_filename.startswith(os.path.dirname(torch.__file__))
"""
"""Pickles by reference, and looks at its classes."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "deeds", [FINALIZER, HELPER, ROWS, SLOT, PATCHED], ids=["finalizer", "helper", "rows", "slot", "patched"]
)
def test_the_script_ends_as_under_python(deeds: str, tmp_path: Path) -> None:
    code, out, err = run(["-q"], LOOP.replace("{}", deeds), tmp_path)
    assert (code, out) == (0, "fine\n"), err
