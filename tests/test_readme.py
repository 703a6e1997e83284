"""README.md says nothing that the program does not: its commands, tables, examples and its first screen."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from fp8doctor import cli
from fp8doctor.cli import delivery
from fp8doctor.report import Report
from fp8doctor.worker.parent import examine_in_worker
from tests import readme

TEXT = readme.README.read_text("utf-8")
FENCED = re.compile(r"(?:<!-- (?P<mark>[^>]*?) -->\n)?^```(?P<language>\w*)\n(?P<code>.*?)^```$", re.S | re.M)


def fenced(mark: str) -> str:
    """The code of the block under a comment."""
    found = [block["code"] for block in FENCED.finditer(TEXT) if block["mark"] == mark]
    assert len(found) == 1, f"README.md has {len(found)} blocks marked {mark!r}"
    return str(found[0])


def commands() -> Iterator[str]:
    """Every command line of fp8doctor: in backticks, and in the set-up commands."""
    prose = FENCED.sub("", re.sub(readme.BLOCK.format(r"\w+"), "", TEXT, flags=re.S))
    yield from dict.fromkeys(re.findall(r"`(fp8doctor [^`]+)`", prose))
    yield from (found.strip() for found in re.findall(r"(?<=bin/)fp8doctor .*", fenced("command: run")))


def table_after(head: str) -> list[list[str]]:
    """The cells of the table whose first row begins with ``head``."""
    lines = TEXT[TEXT.index(f"| {head} ") :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


@pytest.mark.parametrize("name", ["checks", "options"])
def test_tables_are_what_the_code_says(name: str) -> None:
    assert readme.written(name) == readme.GENERATED[name](), "python -m tests.readme writes it again"


@pytest.mark.slow
def test_first_screen_is_what_the_command_prints() -> None:
    """Modulo versions; README's was made without a GPU, and says so."""
    made = readme.screen()
    if "no GPU;" not in made:
        pytest.skip("README shows a machine without a GPU")
    assert readme.without_versions(readme.written("screen")) == readme.without_versions(made)


def test_recorded_screen_is_what_demo_prints() -> None:
    assert readme.written("recorded") == readme.recorded(), "python -m tests.readme writes it again"


def test_recorded_screen_names_hardware_and_versions() -> None:
    heading = readme.written("recorded").splitlines()[1]
    assert re.search(r"NVIDIA \w+, \d+\.\d+ · torch [\d.]+ · torchao [\d.]+", heading)


def test_first_screen_says_what_it_rests_on() -> None:
    around = " ".join(TEXT.split("<!-- generated: screen -->")[0].split("## The first screen")[1].split())
    assert "without a GPU" in around
    assert "modelled" in around
    assert "ms a step, modelled on" in readme.written("screen")


@pytest.mark.parametrize("line", list(commands()))
def test_command_parses(line: str) -> None:
    program, *arguments = shlex.split(line)
    assert program == "fp8doctor"
    context = cli.main.make_context("fp8doctor", arguments)
    name, command, rest = cli.main.resolve_command(context, [*context._protected_args, *context.args])
    assert command is not None
    assert command.make_context(name, rest, parent=context)


def test_every_command_has_a_row() -> None:
    words = {shlex.split(row[0].strip("`"))[1] for row in table_after("command")}
    assert words == {"model.py", *cli.main.commands}


def test_list_and_explain_take_what_is_said() -> None:
    said = "`list` and `explain` take `--format text|json` and `--checks DIR`."
    assert said in TEXT
    for command in (cli.list_, cli.explain):
        assert {opt for option in readme.shown(command) for opt in option.opts} == {"--format", "--checks"}


def test_reports_share_their_options() -> None:
    gates = {"min_speedup", "strict", "baseline", "max_regression"}
    every = {
        frozenset(readme.names(command) - gates - {"python"}) for command in (cli.env, cli.report_, cli.demo)
    }
    assert len(every) == 1
    assert all(gates <= readme.names(command) for command in (cli.examine, cli.run, cli.report_))
    assert every.pop() < readme.names(cli.examine)


def test_exit_codes_are_those_of_the_command_line() -> None:
    assert [row[0] for row in table_after("exit code")] == [
        str(code) for code in (delivery.OK, delivery.FOUND, delivery.FAILED, delivery.INTERRUPTED)
    ]


def test_options_named_in_the_text_exist() -> None:
    known = {
        opt
        for command in (cli.examine, *cli.main.commands.values())
        for option in readme.shown(command)
        for opt in option.opts
    }
    prose = FENCED.sub("", TEXT)
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", prose)) <= known


def test_files_named_in_the_text_exist() -> None:
    for name in re.findall(r"`((?:checks|tests|fp8doctor)/[\w./]+)`", TEXT):
        assert (readme.ROOT / name).exists(), name


def test_set_up_commands_pin_no_build_of_torch() -> None:
    for mark, extra in (("command: run", ".[torchao]"), ("command: test", ".[test]")):
        command = fenced(mark)
        assert "venv" in command
        assert f"'{extra}'" in command
        assert "torch=" not in command
        assert "index" not in command
    assert readme.PATIENT in fenced("command: run")
    assert "pytest" in fenced("command: test")


def test_api_example_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch
    from torch import nn
    from torchao.float8 import convert_to_float8_training

    monkeypatch.chdir(tmp_path)
    model = convert_to_float8_training(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).bfloat16())
    names: dict[str, Any] = {"model": model, "batch": torch.randn(32, 64, dtype=torch.bfloat16)}
    exec(compile(fenced("example: api"), "README.md", "exec"), names)
    assert isinstance(names["report"], Report)
    assert "CMP001" in capsys.readouterr().out
    assert (tmp_path / "report.json").is_file()


def test_report_fields_exist() -> None:
    named = {field.strip("`").removeprefix("report.").removesuffix("()") for field, _ in table_after("field")}
    assert named >= {"verdict", "findings", "prescription", "outcomes", "facts", "to_dict"}
    assert all(hasattr(Report, name) for name in named)


def test_api_options_exist() -> None:
    import inspect

    from fp8doctor import inspect_model

    said = TEXT.split("`inspect_model` works in your process")[1].split("## ")[0]
    parameters = inspect.signature(inspect_model).parameters
    assert set(re.findall(r"`(\w+)(?:=\w+)?`", said)) == {*parameters} - {"model", "batch"}


@pytest.mark.slow
def test_model_file_example_is_examined(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(fenced("example: model file"), "utf-8")
    examination = examine_in_worker(str(path), layers=2, progress=lambda stage: None)
    assert examination.problem is None
    assert len(examination.facts.network.linears) == 2
    assert examination.facts.workload.tokens == 4096


def test_nothing_in_it_is_a_click_usage_error() -> None:
    """A line with an option that does not exist is noticed: the parser of these tests is the real one."""
    with pytest.raises(click.UsageError):
        test_command_parses("fp8doctor env --no-such-option")
