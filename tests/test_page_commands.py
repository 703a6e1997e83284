"""Commands, options, names of the API and examples on the pages: they exist, and they run."""

import ast
import gzip
import importlib.util
import inspect
import json
import re
import shlex
import shutil
from collections.abc import Iterator
from configparser import ConfigParser
from pathlib import Path
from typing import Any, get_args

import click
import pytest
from click.testing import CliRunner

from fp8doctor import cli
from fp8doctor.answer.verdict import Status
from fp8doctor.cli import console, options
from fp8doctor.cli.pages import DEMO
from fp8doctor.report import Report
from fp8doctor.worker.parent import examine_in_worker
from tests import check_pages, readme
from tests.markdown import ROOT, blocks, fenced, prose, rows_after, text
from tests.test_pages import FOR_USERS

COMMAND = re.compile(r"^(?:\.venv/bin/)?fp8doctor\s.*?(?=\s+#|$)", re.M)


def commands() -> Iterator[str]:
    """Yield every command line of fp8doctor: in backticks, and in blocks for a shell."""
    for page in [*FOR_USERS, *(f"docs/checks/{name}" for name in check_pages.pages())]:
        yield from re.findall(r"`(fp8doctor [^`]+)`", prose(page)) if "checks/" not in page else ()
        shell = (line for each in blocks(page) if each.language == "sh" for line in each.code.split(" && "))
        for line in shell:
            yield from (found.removeprefix(".venv/bin/").strip() for found in COMMAND.findall(line))


def parse(line: str) -> None:
    program, *arguments = shlex.split(line, comments=True)
    assert program == "fp8doctor"
    context = cli.main.make_context("fp8doctor", arguments)
    name, command, rest = cli.main.resolve_command(context, [*context._protected_args, *context.args])
    assert command is not None
    assert command.make_context(name, rest, parent=context)


def test_commands_and_options_exist() -> None:
    lines = set(commands())
    assert len(lines) > 50
    for line in lines:
        parse(line)
    with pytest.raises(click.UsageError):
        parse("fp8doctor env --no-such-option")
    known = {
        opt
        for command in readme.COMMANDS.values()
        for option in readme.shown(command)
        for opt in (*option.opts, *option.secondary_opts)
    }
    named = {
        (page, each) for page in FOR_USERS for each in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", prose(page))
    }
    assert [(page, each) for page, each in named if each not in known] == []
    words = {shlex.split(row[0].strip("`"))[1] for row in rows_after("docs/options.md", "command")}
    assert words == {name or "model.py" for name in readme.COMMANDS}
    codes = (console.OK, console.FOUND, console.FAILED, console.INTERRUPTED)
    assert [row[0] for row in rows_after("docs/options.md", "exit code")] == [*map(str, codes)]


def test_reports_share_their_options() -> None:
    gates = {key.replace("-", "_") for key in options.GATE} - {"fail_on"}
    names = {name: readme.names(command) for name, command in readme.COMMANDS.items()}
    every = {frozenset(names[name] - gates) for name in ("env", "report", "demo")}
    assert len(every) == 1
    assert all(gates <= names[name] for name in ("", "run", "report"))
    assert every.pop() < names[""]


def test_the_readmes_commands_pin_no_torch_and_the_first_needs_none() -> None:
    marks = [block.mark for block in blocks("README.md")]
    assert marks[0] == "command: run"
    assert "install . &&" in fenced("command: run")
    assert "'.[test]'" in fenced("command: test")
    for mark in ("command: run", "command: test"):
        assert not re.search(r"torch=|index", fenced(mark))
    assert len(text("README.md").splitlines()) <= 90
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    said = " ".join(text("README.md").split()).split("The extras are ")[1].split("You need")[0]
    assert set(re.findall(r"`(\w+)`", said)) == {*setup["options.extras_require"]} - {"dev", "docs", "lint"}


def test_names_of_the_api_exist() -> None:
    rows = rows_after("docs/api.md", "field")
    named = {field.strip("`").removeprefix("report.").removesuffix("()") for field, _ in rows}
    assert named >= {"verdict", "findings", "prescription", "outcomes", "facts", "to_dict"}
    assert all(hasattr(Report, name) for name in named)
    assert tuple(re.findall(r"`(\w+)`", rows[0][1].split("(")[1].split(")")[0])) == get_args(Status)
    from fp8doctor import inspect_model

    said = text("docs/api.md").split("`inspect_model` works in your process")[1].split("## ")[0]
    parameters = {*inspect.signature(inspect_model).parameters} - {"model", "batch"}
    assert set(re.findall(r"`(\w+)(?:=\w+)?`", said)) == parameters


def test_examples_are_python_with_names_that_exist() -> None:
    """Found in the source: some of these modules import the framework that they are for."""
    codes = [block.code for page in FOR_USERS for block in blocks(page) if block.language == "python"]
    imported = [
        node
        for code in codes
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("fp8doctor")
    ]
    assert len(imported) > 3
    for node in imported:
        source = Path(str(importlib.util.find_spec(str(node.module)).origin)).read_text("utf-8")
        assert all(re.search(rf"(class |def |\"){each.name}\b", source) for each in node.names)


@pytest.mark.slow
def test_the_examples_of_the_api_and_of_a_model_file_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch
    from torch import nn
    from torchao.float8 import convert_to_float8_training

    monkeypatch.chdir(tmp_path)
    model = convert_to_float8_training(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).bfloat16())
    names: dict[str, Any] = {"model": model, "batch": torch.randn(32, 64, dtype=torch.bfloat16)}
    exec(compile(fenced("example: api"), "docs/api.md", "exec"), names)
    assert isinstance(names["report"], Report)
    assert "CMP001" in capsys.readouterr().out
    assert (tmp_path / "report.json").is_file()
    (tmp_path / "model.py").write_text(fenced("example: model file"), "utf-8")
    examination = examine_in_worker(str(tmp_path / "model.py"), layers=2, progress=lambda stage: None)
    assert examination.problem is None
    assert len(examination.facts.network.linears) == 2
    assert examination.facts.workload.tokens == 4096


ERROR = (
    "RuntimeError: Expected trailing dimension of mat1 to be divisible by 16 but got mat1 shape: (512x50)."
)


NEEDS_A_JOB = ("model.py", "run", "env", "trace")


@pytest.mark.slow
def test_commands_for_agents_run_and_the_json_is_as_they_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = text("docs/SKILL.md")
    monkeypatch.chdir(tmp_path)
    for name in ("report.json", "before.json", "after.json"):
        shutil.copy(DEMO, tmp_path / name)
    health = ROOT / "tests/health/recorded/h100-tensorwise.jsonl.gz"
    (tmp_path / "health.jsonl").write_bytes(gzip.decompress(health.read_bytes()))
    run = 0
    for command in {each for each in re.findall(r"`(fp8doctor [^`]+)`", page) if "CODE" not in each}:
        args = [ERROR if each == "RuntimeError: ..." else each for each in shlex.split(command)[1:]]
        if args[0] not in NEEDS_A_JOB:
            result = CliRunner().invoke(cli.main, args, input=ERROR)
            assert result.exit_code == (args[0] == "report"), result.stderr  # the demo's FP8 is slower
            assert "--format" not in args or json.loads(result.stdout)
            run += 1
    assert run >= 6
    known = json.loads(text("fp8doctor/report.schema.json"))["$defs"]["Report"]["properties"]
    for key in ("verdict", "prescription", "next", "findings", "outcomes", "ignored"):
        assert key in known
        assert f"`{key}" in page
    assert all(f"`{status}`" in page for status in get_args(Status))
