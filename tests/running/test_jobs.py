"""Whole jobs under ``fp8doctor run``: diagnosed, and trained to the same bits as without it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fp8doctor.facts import Facts
from tests.running.jobs import PLAIN_LOOP, TRAINER, TWO_STEPS
from tests.running.test_script import environment, printed_here, run, script

pytestmark = pytest.mark.slow


def test_a_plain_loop_with_eager_float8(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*script(tmp_path, PLAIN_LOOP), "--steps", "12"]
    plain = printed_here(arguments, tmp_path, capsys)
    options = ["--steps", "4", "--warmup", "2", "--save", "report.json"]
    code, out, err = run(["-m", "fp8doctor", "run", *options, *arguments], tmp_path)
    assert (code, out) == (0, plain), err
    assert len(plain.splitlines()) == 12 + 1
    assert "6 of 6 FP8 Linears run uncompiled" in " ".join(err.split())
    assert "CMP001" in err
    saved = json.loads((tmp_path / "report.json").read_text())
    facts = Facts.from_dict(saved["facts"])
    assert (facts.target.kind, facts.target.name) == ("script", "train.py")
    assert (len(facts.observed.steps_ms), facts.observed.warmup) == (4, 2)
    assert facts.observed.calls == 1
    assert facts.observed.data_ms is not None
    assert (facts.workload.batch_size, facts.workload.tokens) == (16, 16)
    assert facts.training.conversion is not None
    assert facts.training.conversion.linears == 6


def test_a_trainer_whose_arguments_override_the_launcher(tmp_path: Path) -> None:
    env = environment(ACCELERATE_MIXED_PRECISION="fp8")
    options = ["--fail-on", "error", "--steps", "3", "--warmup", "2", "--select", "ENV,MOD"]
    code, out, err = run(["-m", "fp8doctor", "run", *options, *script(tmp_path, TRAINER)], tmp_path, env=env)
    assert out.endswith("trained\n"), err
    assert "ENV001" in err
    assert "4 × 32 tokens" in err
    assert code == 1


def test_a_script_that_ends_before_its_window(tmp_path: Path) -> None:
    code, _, err = run(["-m", "fp8doctor", "run", *script(tmp_path, TWO_STEPS)], tmp_path)
    assert code == 9
    assert "the script ended before 15 steps were watched" in err
    assert "without Python's own end: os._exit" in err
    assert "train.py: 6 parameters" in err
    assert "This model uses no FP8" in err


FAILS = """
import torch
model = torch.nn.Linear(2, 2)
raise RuntimeError("Expected trailing dimension of mat1 to be divisible by 16 but got mat1 shape: (1003x64)")
"""


def test_a_script_that_fails_before_its_first_step(tmp_path: Path) -> None:
    env = environment(ACCELERATE_MIXED_PRECISION="fp8", ACCELERATE_FP8_BACKEND="TE")
    code, out, err = run(["-m", "fp8doctor", "run", *script(tmp_path, FAILS)], tmp_path, env=env)
    assert (code, out) == (1, "")
    assert err.index("Traceback") < err.index("fp8doctor: no training step was seen")
    assert "the script failed before its first, RuntimeError: Expected trailing dimension" in err
    assert "More: fp8doctor explain SHP001" in err
    assert "No model was examined: the script failed before its first step." in err
    assert "ENV004" in err
