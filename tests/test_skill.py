"""docs/SKILL.md: its commands run, or are parsed where they need a model, and the JSON is as it says."""

from __future__ import annotations

import gzip
import json
import re
import shlex
import shutil
from pathlib import Path
from typing import get_args

import pytest
from click.testing import CliRunner

from fp8doctor import cli
from fp8doctor.answer.verdict import Status
from fp8doctor.cli.commands import DEMO
from tests.schema import FILE

PAGE = (Path(__file__).parents[1] / "docs" / "SKILL.md").read_text("utf-8")
COMMANDS = sorted({each for each in re.findall(r"`(fp8doctor [^`]+)`", PAGE) if "CODE" not in each})
ERROR = (
    "RuntimeError: Expected trailing dimension of mat1 to be divisible by 16 but got mat1 shape: (512x50)."
)

HEALTH = Path(__file__).parent / "health" / "recorded" / "h100-tensorwise.jsonl.gz"

PARSED = ("model.py", "run", "env", "trace")
"""What loads a model, starts a process or reads a trace."""


def test_the_page_is_thin() -> None:
    assert len(PAGE.splitlines()) < 120
    assert len(COMMANDS) >= 10


@pytest.mark.parametrize("command", COMMANDS)
def test_commands(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("report.json", "before.json", "after.json"):
        shutil.copy(DEMO, tmp_path / name)
    (tmp_path / "health.jsonl").write_bytes(gzip.decompress(HEALTH.read_bytes()))
    _, *args = shlex.split(command)
    if args[0] in PARSED:
        known = args[0] in cli.main.commands
        named = cli.main.commands.get(args[0], cli.examine)
        assert named.make_context(args[0], args[1:] if known else args).params
        return
    args = [ERROR if each == "RuntimeError: ..." else each for each in args]
    result = CliRunner().invoke(cli.main, args, input=ERROR)
    assert result.exit_code == (args[0] == "report"), result.stderr  # the demo's FP8 is slower
    if "--format" in args:
        assert json.loads(result.stdout)


def test_what_it_says_of_the_json_is_there() -> None:
    properties = json.loads(FILE.read_text("utf-8"))["$defs"]["Report"]["properties"]
    for key in ("verdict", "prescription", "next", "findings", "outcomes", "ignored"):
        assert key in properties
        assert f"`{key}" in PAGE
    assert all(f"`{status}`" in PAGE for status in get_args(Status))
    following = json.loads(CliRunner().invoke(cli.main, ["report", str(DEMO), "--format", "json"]).stdout)[
        "next"
    ]
    assert following["command"] == "fp8doctor explain CMP001"
    assert following["verify"] == "fp8doctor llama_8b_eager.py"
    assert following["saving_ms"]["low"] > 0
