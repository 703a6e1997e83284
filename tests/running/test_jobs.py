"""A whole job under ``fp8doctor run``: diagnosed, and trained to the same bits as without it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fp8doctor.facts import Facts
from tests.running.jobs import PLAIN_LOOP
from tests.running.test_script import printed_here, run, script

pytestmark = pytest.mark.slow


def test_a_plain_loop_with_eager_float8(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*script(tmp_path, PLAIN_LOOP), "--steps", "12"]
    plain = printed_here(arguments, tmp_path, capsys)
    options = ["--steps", "4", "--warmup", "2", "--save", "report.json"]
    code, out, err = run(["-m", "fp8doctor", "run", *options, *arguments], tmp_path)
    assert (code, out) == (0, plain), err
    assert len(plain.splitlines()) == 12 + 1
    assert "6 of 6 FP8 Linears are not compiled" in " ".join(err.split())
    saved = json.loads((tmp_path / "report.json").read_text())
    facts = Facts.from_dict(saved["facts"])
    assert (facts.target.kind, facts.target.name) == ("script", "train.py")
    assert (len(facts.observed.steps_ms), facts.observed.warmup) == (4, 2)
    assert facts.observed.calls == 1
    assert facts.observed.data_ms is not None
    assert (facts.workload.batch_size, facts.workload.tokens) == (16, 16)
    assert facts.training.conversion is not None
    assert facts.training.conversion.linears == 6
