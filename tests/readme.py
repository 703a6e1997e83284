"""The parts of README.md that are made from the code: ``python -m tests.readme`` writes them,
`tests.test_readme` holds them.

Each stands between ``<!-- generated: NAME -->`` and ``<!-- end -->``.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import click

from fp8doctor import cli, registry

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
PATIENT = "tests/patients/decoder_468m.py"

BLOCK = "(<!-- generated: {} -->\n)(.*?)(<!-- end -->)"
VERSION = re.compile(r"\b(fp8doctor|torch|torchao|TE) \d\S*")


def checks() -> str:
    """The catalogue as a table."""
    rows = (
        (check.code, check.area, check.severity, f"{check.title} (`{check.name}`)")
        for check in registry.discover()
    )
    return table(("code", "area", "severity", "what it finds"), rows)


def options() -> str:
    """The options of every report in one table, those that only a model file or a script takes in others."""
    of_every_report = names(cli.demo)
    of_the_gate = names(cli.report_) - of_every_report
    elsewhere = of_every_report | of_the_gate
    everywhere = [option for option in shown(cli.examine) if option.name in of_every_report]
    gates = [option for option in shown(cli.examine) if option.name in of_the_gate]
    models_only = [option for option in shown(cli.examine) if option.name not in elsewhere]
    scripts_only = [option for option in shown(cli.run) if option.name not in elsewhere]
    return "\n".join(
        (
            optiontable("option of every report", everywhere),
            optiontable("gate of `fp8doctor model.py`, `run` and `report`", gates),
            optiontable("option of `fp8doctor model.py` only", models_only),
            optiontable("option of `fp8doctor run` only", scripts_only),
        )
    )


def shown(command: click.Command) -> list[click.Option]:
    """The options of a command that its help shows."""
    return [
        parameter
        for parameter in command.params
        if isinstance(parameter, click.Option) and not parameter.hidden
    ]


def names(command: click.Command) -> set[str | None]:
    return {option.name for option in shown(command)}


def optiontable(title: str, options: Iterable[click.Option]) -> str:
    context = click.Context(cli.examine)
    return table(
        (title, "what it does"),
        ((f"`{', '.join(option.opts)}{metavar(option, context)}`", described(option)) for option in options),
    )


def metavar(option: click.Option, context: click.Context) -> str:
    """What stands behind the option: a name, or the words to choose from."""
    if option.is_flag:
        return ""
    return " " + (
        "|".join(option.type.choices)
        if isinstance(option.type, click.Choice)
        else option.make_metavar(context)
    )


def described(option: click.Option) -> str:
    default = (
        f" Default: {option.default:g}."
        if isinstance(option.default, float)
        else f" Default: {option.default}."
        if option.show_default
        else ""
    )
    return (option.help or "") + default


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A table of Markdown; a bar inside a cell is escaped."""
    lines = [head, ("---",) * len(head), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def screen() -> str:
    """What the command line prints for the patient, on this machine."""
    return printed(PATIENT, code=0)


def recorded() -> str:
    """What the command line prints for the recording that ships, which is the same on every machine."""
    return printed("demo", code=1)


def printed(*arguments: str, code: int) -> str:
    """The output of a command in a process of its own, fenced."""
    plain = {
        name: value for name, value in os.environ.items() if name not in ("LC_ALL", "LANG", "FORCE_COLOR")
    } | {"PYTHONIOENCODING": "utf-8"}
    command = [sys.executable, "-m", "fp8doctor", *arguments]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=plain,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=300,
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert "crashed" not in done.stdout, done.stdout
    return f"```text\n{done.stdout}```\n"


def without_versions(text: str) -> str:
    """The text with the versions taken out, which differ from machine to machine."""
    return VERSION.sub(r"\1 ...", text)


GENERATED = {"screen": screen, "recorded": recorded, "options": options, "checks": checks}


def written(name: str) -> str:
    """What stands in README.md under that name."""
    found = re.search(BLOCK.format(name), README.read_text("utf-8"), re.S)
    assert found, f"README.md has no place for {name!r}"
    return found[2]


def main() -> None:
    text = README.read_text("utf-8")
    for name, make in GENERATED.items():
        made = make()
        text = re.sub(
            BLOCK.format(name), lambda found, made=made: found[1] + made + found[3], text, flags=re.S
        )  # type: ignore[misc]
    README.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
