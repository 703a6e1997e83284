"""What users read keeps to the style: the word list of `tests.not_said`, and sentences of at most 25 words.

Code and tables are left out; the texts of checks are in `tests.test_catalogue`. No linter of an index fits:
Vale's package downloads its program when it runs, and proselint has no list of one's own words.
"""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

from fp8doctor import cli
from tests.markdown import GENERATED, ROOT, split_sentences, text
from tests.not_said import not_said, phrases
from tests.readme import shown

FOR_DEVELOPERS = {"ARCHITECTURE.md", "layers.md", "traps.md"}
PAGES = (
    *("README.md", "CHANGELOG.md", "SECURITY.md", "examples/README.md"),
    *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md") if path.name not in FOR_DEVELOPERS),
)
COMMANDS = {command.name or "": command for command in (cli.examine, *cli.main.commands.values())}
FOLDERS = (
    *("analysis", "cli", "diagnosis", "health", "loading", "patching"),
    *("planning", "render", "trial", "worker"),
)
"""Packages whose strings are in the style."""

MODULES = sorted(path for folder in FOLDERS for path in (ROOT / "fp8doctor" / folder).rglob("*.py"))
STORED = {"made up"}
"""Values of facts, as recordings have them."""

MOST_WORDS = 25


def faults(page: str) -> list[str]:
    """Name what a page has that its readers should not meet."""
    prose = re.sub(r"^\|.*\n", "\n", re.sub(GENERATED.format(r"\w+"), "", page, flags=re.S), flags=re.M)
    found = list(split_sentences(prose))
    long = [each for each in found if len(each.split()) > MOST_WORDS]
    return [*long, *(fault for each in found for fault in not_said(each))]


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_in_the_style(page: str) -> None:
    assert faults(text(page)) == []


@pytest.mark.parametrize("page", sorted(path.name for path in (ROOT / "docs/checks").glob("[A-Z]*[0-9].md")))
def test_a_check_page_is_in_the_style(page: str) -> None:
    """Up to its references, which are names, versions and numbers."""
    assert faults(text(f"docs/checks/{page}").split("**References.**")[0]) == []


@pytest.mark.parametrize("name", COMMANDS)
def test_a_help_is_in_the_style(name: str) -> None:
    command: click.Command = COMMANDS[name]
    helps = (command.help, command.epilog, *(option.help for option in shown(command)))
    assert [fault for each in helps for fault in faults(re.sub(r"(\w+, ){5,}", "", each or ""))] == []


def plain(phrase: str) -> str:
    """Return a phrase without the names of code in it."""
    return re.sub(r"`+[^`]*`+", "", phrase)


@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.stem)
def test_a_message_is_in_the_style(module: Path) -> None:
    assert [fault for phrase in {*phrases(module)} - STORED for fault in not_said(plain(phrase))] == []


@pytest.mark.parametrize("page", ["It is dear.\n", f"A {'word ' * 25}\n\n", "- fine\n- Mended, one\n"])
def test_faults_are_found(page: str) -> None:
    assert len(faults(page)) == 1
    assert faults("| dear |\n|---|\n\n```sh\ndear\n```\nShort `and dear` is fine.\n") == []
