"""The command line's habits: help, examples, mistyped commands, several codes, completion."""

import shlex
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from fp8doctor import cli
from fp8doctor.cli.commands import refuse_mistyped
from fp8doctor.stages import BUDGET_S


def fp8doctor(*args: str, **variables: str) -> Result:
    return CliRunner().invoke(cli.main, list(args), env=variables, prog_name="fp8doctor")


def completed(line: str) -> list[str]:
    """What bash is offered behind a line whose last word is not finished."""
    words = shlex.split(line)
    result = fp8doctor(
        COMP_WORDS=line,
        COMP_CWORD=str(len(words) - 1 + line.endswith(" ")),
        _FP8DOCTOR_COMPLETE="bash_complete",
    )
    return [each.partition(",")[2] for each in result.stdout.splitlines() if each.startswith("plain,")]


COMMANDS = cli.main.every()


@pytest.mark.parametrize("command", COMMANDS)
def test_h_is_help(command: str) -> None:
    short, long = (fp8doctor(*filter(None, (command, option))) for option in ("-h", "--help"))
    assert (short.exit_code, short.stdout) == (0, long.stdout)
    assert "-h, --help" in short.stdout


def test_help_shows_what_is_used_every_day_and_all_of_it_when_asked() -> None:
    pages = {name: fp8doctor(*filter(None, (name, "--help"))).stdout for name in COMMANDS}
    lines = {name: len(page.splitlines()) for name, page in pages.items()}
    assert lines[""] <= 45
    assert max(lines["report"], lines["compare"], lines["demo"]) <= 20
    assert all(f"\n  {name} " in pages[""] or f"'{name}'" in pages[""] for name in COMMANDS if name)
    for name, command in COMMANDS.items():
        options = {
            option for each in command.params if isinstance(each, click.Option) for option in each.opts
        }
        whole = "--help-all" if "--help-all" in options else "--help"
        assert [each for each in options if each not in fp8doctor(*filter(None, (name, whole))).stdout] == []
    assert f"Default: {BUDGET_S:g}" in pages[""]


RUN = "'fp8doctor run train_h100.py ARGS...'"


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("expalin CMP001", "explain?"),
        ("reprot", "report?"),
        ("lst", "list?"),
        ("train_h100.py --use_fp8 --compile_model", RUN),
        ("--use_fp8 train_h100.py", RUN),
        ("train_h100.py --batch_size 16", RUN),
        ("train_h100.py config.yaml", RUN),
        ("model.py --batch many", ""),
        ("model.py --batch", ""),
        ("pkg.model --use_fp8", ""),
    ],
)
def test_a_mistake_is_answered_with_what_was_meant(
    typed: str, meant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = fp8doctor(*typed.split())
    assert (result.exit_code, result.stdout) == (2, "")
    assert meant in " ".join(result.stderr.split())
    assert ("fp8doctor run" in result.stderr) == (meant == RUN)


def test_a_file_or_a_module_named_nearly_like_a_command_is_a_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lists.py").write_text("syntax error")
    refuse_mistyped("./list", ["list"])
    refuse_mistyped("lists", ["list"])
    refuse_mistyped("statistics", ["statistic"])
    (tmp_path / "lists.py").unlink()
    with pytest.raises(click.UsageError, match="did you mean list"):
        refuse_mistyped("lists", ["list"])


def test_commands_and_choices_are_completed() -> None:
    assert completed("fp8doctor co") == ["compare"]
    assert completed("fp8doctor expl") == ["explain"]
    assert completed("fp8doctor report --fail-on w") == ["warning"]
