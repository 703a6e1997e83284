"""``run`` reports as soon as the steps are watched and completes the report at the script's end; with
``--health`` its file survives the script's death."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from fp8doctor.facts import Facts, recorded
from fp8doctor.health.record import read_health
from tests.running.test_script import both, run, script, without_ours

pytestmark = pytest.mark.slow

WAITS_FOR_THE_REPORT = """
import os, pathlib, shutil, signal, sys, time

import torch

signal.alarm(300)
torch.manual_seed(0)
model = torch.nn.Linear(16, 16)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(12):
    model(torch.ones(8, 16)).pow(2).mean().backward()
    optimizer.step()
os.makedirs("early")
for name in sys.argv[2:]:
    while not pathlib.Path(name).exists():
        time.sleep(0.02)
    shutil.copy(name, "early")
print("trained")
if sys.argv[1] == "killed":
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""
"""It goes on until the files that it is told are there, keeps copies of them, and ends or is killed."""

WATCH = ("-m", "fp8doctor", "run", "--steps", "4", "--warmup", "2")

FILES = ("report.html", "report.md", "report.json")


def watched(folder: Path, end: str, *options: str) -> tuple[int, str, list[str]]:
    command = [*WATCH, *options, "-o", FILES[0], "-o", FILES[1], "--save", FILES[2]]
    code, out, err = run([*command, *script(folder, WAITS_FOR_THE_REPORT), end, *FILES], folder)
    return code, out, [line for line in err.splitlines() if line.startswith("fp8doctor: ")]


def facts_in(folder: Path) -> Facts:
    saved: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return Facts.from_dict(saved["facts"])


@pytest.mark.parametrize("gate", [(), ("--fail-on", "error")])
def test_the_files_are_there_while_the_script_trains(tmp_path: Path, gate: tuple[str, ...]) -> None:
    code, out, said = watched(tmp_path, "ended", *gate)
    assert (code, out) == (0, "trained\n"), said
    assert len(facts_in(tmp_path / "early").observed.steps_ms) == 4
    assert recorded(facts_in(tmp_path / "early").observed, "breakdown")
    assert facts_in(tmp_path / "early") == facts_in(tmp_path)
    assert (tmp_path / "early" / "report.html").read_text().rstrip().endswith("</html>")
    early = [line for line in said if "when the script ends" in line]
    assert len(early) == 1
    assert "after 8 steps" in early[0]
    assert all(name in early[0] for name in FILES)
    assert said.index(early[0]) < said.index("fp8doctor: wrote report.html, report.md, report.json")


def test_a_script_that_is_killed_leaves_the_files(tmp_path: Path) -> None:
    code, out, said = watched(tmp_path, "killed")
    assert (code, out) == (-signal.SIGKILL, "trained\n"), said
    assert facts_in(tmp_path / "early").observed.steps_ms


def test_a_report_that_cannot_be_written_yet(tmp_path: Path) -> None:
    """The script makes the file's folder anew; the report at the end is written into it."""
    text = WAITS_FOR_THE_REPORT.replace("torch.manual_seed(0)", 'os.rmdir("out")')
    text = text.replace('print("trained")', 'time.sleep(3); os.mkdir("out"); print("trained")')
    (tmp_path / "out").mkdir()
    files = ["-o", "out/report.md", "-o", "report.html", "--save", "report.json"]
    arguments = [*script(tmp_path, text), "ended", "report.json"]
    code, out, err = run([*WATCH, *files, *arguments], tmp_path)
    assert (code, out) == (0, "trained\n"), err
    assert (tmp_path / "out" / "report.md").exists()
    assert "cannot write out/report.md: No such file or directory; fp8doctor tries again" in err


PLAIN_LOOP = """
import os, sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchao.float8 import convert_to_float8_training

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        return x + self.down(nn.functional.dropout(torch.relu(self.up(self.norm(x))), 0.1, self.training))

steps = int(sys.argv[1])
torch.manual_seed(0)
model = nn.Sequential(*[Block(32) for _ in range(3)]).bfloat16()
convert_to_float8_training(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
rows = TensorDataset(torch.randn(16 * steps, 32, dtype=torch.bfloat16))
with torch.backends.mkldnn.flags(enabled=False):
    for step, (x,) in enumerate(DataLoader(rows, batch_size=16, shuffle=True), 1):
        loss = (model(x) - x.roll(1, 1)).float().pow(2).mean()
        if sys.argv[2:] == ["bad"]:
            loss = loss * float("nan")
        if sys.argv[2:] == ["killed"] and step == 40:
            os.kill(os.getpid(), 9)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(loss.item())
print([each.float().sum().item() for each in model.parameters()], torch.rand(1).item())
"""
"""torchao's eager Float8, which is slower than BF16. Its losses, weights and random numbers are printed."""

HEALTH = ("--health", "health", "--every", "4")


def test_a_plain_loop_with_eager_float8(tmp_path: Path) -> None:
    arguments = [*script(tmp_path, PLAIN_LOOP), "40"]
    watching = ("--steps", "4", "--warmup", "2", "--save", "report.json", *HEALTH)
    plain, (code, out, err) = both(arguments, tmp_path, *watching)
    assert (code, out) == plain[:2], err
    assert (code, len(out.splitlines())) == (0, 40 + 1)
    assert "6 of 6 FP8 Linears are not compiled" in " ".join(err.split())
    facts = facts_in(tmp_path)
    assert (len(facts.observed.steps_ms), facts.observed.calls) == (4, 1)
    assert facts.observed.data_ms is not None
    assert (facts.workload.batch_size, facts.workload.tokens) == (16, 16)
    health = read_health(tmp_path / "health")
    assert health.steps == tuple(range(health.steps[0], 41, 4))
    assert len(health.steps) >= 5
    assert len(health.series()) == 6 * 3


def test_a_killed_script_leaves_its_health_and_goes_on(tmp_path: Path) -> None:
    command = ["-m", "fp8doctor", "run", "-q", *HEALTH, *script(tmp_path, PLAIN_LOOP), "60", "killed"]
    code, _, _ = run(command, tmp_path)
    assert code == -signal.SIGKILL
    before = read_health(tmp_path / "health")
    assert len(before.headers) == 1
    assert 30 <= before.steps[-1] <= 40
    run(command, tmp_path)
    assert len(read_health(tmp_path / "health").headers) == 2


def test_it_stops_with_the_report_if_asked(tmp_path: Path) -> None:
    command = ["-m", "fp8doctor", "run", "-q", "--stop-on-nan", *script(tmp_path, PLAIN_LOOP), "9", "bad"]
    code, _, err = run(command, tmp_path)
    assert code == 1
    assert "step 1: the loss is not finite." in err
    assert "Traceback" not in without_ours(err)
