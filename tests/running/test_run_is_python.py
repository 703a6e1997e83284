"""A script under ``fp8doctor run`` does to the world what it does under Python: fp8doctor copies none of its
objects, runs none of its code again and keeps no batch."""

from pathlib import Path

import pytest

from tests.running.forks import run
from tests.running.test_script import both, script

pytestmark = pytest.mark.slow

LOOP = """
import os, shutil, sqlite3, weakref
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

COMPILED = f"""
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
{ROWS}
Net.asked = torch.compiler.disable(asked)
own = Net.__init__
def build(self):
    own(self)
    convert_to_float8_training(self, config=Float8LinearConfig(emulate=True))
    self.compile(backend="eager")
Net.__init__ = build
"""

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


@pytest.mark.parametrize("options", [[], ["--health", "health", "--every", "3"]], ids=["run", "health"])
@pytest.mark.parametrize(
    "deeds", [FINALIZER, ROWS, COMPILED, SLOT], ids=["finalizer", "rows", "compiled rows", "slot"]
)
def test_the_script_ends_as_under_python(deeds: str, options: list[str], tmp_path: Path) -> None:
    code, out, err = run(["-q", *options], LOOP.replace("{}", deeds), tmp_path)
    assert (code, out) == (0, "fine\n"), err
    assert Path(tmp_path, "health").exists() is bool(options)


CONVERTED = """
import torch
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).bfloat16()
emulated = Float8LinearConfig(emulate=True)
convert_to_float8_training(model, config=emulated, module_filter_fn=lambda module, name: {takes})
optimizer = torch.optim.SGD(model.parameters())
for _ in range(6):
    model(torch.ones(16, 64, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
print("trained")
"""


@pytest.mark.parametrize("takes", [True, False])
def test_a_script_may_be_required_to_train_in_fp8(takes: bool, tmp_path: Path) -> None:
    options = ["--require-fp8", "--steps", "3", "--warmup", "1", "--select", "STP"]
    code, out, err = run(options, CONVERTED.format(takes=takes), tmp_path)
    assert out.endswith("trained\n"), err
    assert code == (0 if takes else 1)
    assert ("FP8 is required. No layer of this model trains in FP8" in err) == (not takes)


TWO_STEPS = """
import os

import torch

model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
os._exit(9)
"""


def test_a_script_that_ends_before_its_window(tmp_path: Path) -> None:
    code, _, err = run([], TWO_STEPS, tmp_path)
    assert code == 9
    assert "the script ended before 15 steps were watched" in err
    assert "without Python's own end: os._exit" in err
    assert "train.py: 6 parameters" in err
    assert "no FP8 in 1 Linear" in err


FAILS = """
import torch
model = torch.nn.Linear(2, 2)
raise RuntimeError("Expected trailing dimension of mat1 to be divisible by 16 but got mat1 shape: (1003x64)")
"""


def test_a_script_that_fails_before_its_first_step(tmp_path: Path) -> None:
    code, out, err = run([], FAILS, tmp_path, ACCELERATE_MIXED_PRECISION="fp8", ACCELERATE_FP8_BACKEND="TE")
    assert (code, out) == (1, "")
    assert err.index("Traceback") < err.index("✗ The script failed before its first step")
    assert err.count("RuntimeError: Expected trailing dimension") == 3  # the traceback, the box, and the text
    assert "fp8doctor explain SHP001" in " ".join(err.replace("│", "").split())
    assert "No model was examined   " not in err
    assert "ENV001" in err


def test_watching_loads_no_compiler(tmp_path: Path) -> None:
    asks = "import sys, warnings, torch\nprint('torch._dynamo' in sys.modules, warnings.filters)"
    plain, watched = both(script(tmp_path, asks), tmp_path)
    assert watched[:2] == plain[:2]
