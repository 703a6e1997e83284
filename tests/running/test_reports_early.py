"""``run`` reports as soon as the steps are watched, and completes the report at the script's end."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from fp8doctor.facts import Facts, recorded
from tests.running.jobs import PLAIN_LOOP
from tests.running.test_script import printed_here, run, script

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
    text = text.replace('print("trained")', 'os.mkdir("out"); print("trained")')
    (tmp_path / "out").mkdir()
    files = ["-o", "out/report.md", "-o", "report.html", "--save", "report.json"]
    arguments = [*script(tmp_path, text), "ended", "report.json"]
    code, out, err = run([*WATCH, *files, *arguments], tmp_path)
    assert (code, out) == (0, "trained\n"), err
    assert (tmp_path / "out" / "report.md").exists()
    assert "cannot write out/report.md: No such file or directory; fp8doctor tries again" in err


def test_a_plain_loop_with_eager_float8(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*script(tmp_path, PLAIN_LOOP), "--steps", "12"]
    plain = printed_here(arguments, tmp_path, capsys)
    options = ["--steps", "4", "--warmup", "2", "--save", "report.json"]
    code, out, err = run(["-m", "fp8doctor", "run", *options, *arguments], tmp_path)
    assert (code, out) == (0, plain), err
    assert len(plain.splitlines()) == 12 + 1
    assert "6 of 6 FP8 Linears are not compiled" in " ".join(err.split())
    facts = facts_in(tmp_path)
    assert (facts.target.kind, facts.target.name) == ("script", "train.py")
    assert (len(facts.observed.steps_ms), facts.observed.warmup) == (4, 2)
    assert facts.observed.calls == 1
    assert facts.observed.data_ms is not None
    assert (facts.workload.batch_size, facts.workload.tokens) == (16, 16)
    assert facts.training.conversion is not None
    assert facts.training.conversion.linears == 6
