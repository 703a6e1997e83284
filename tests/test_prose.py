"""What users read keeps to the style: the word list of `tests.not_said`, and sentences of at most 25 words.

Code and tables are left out. No linter of an index fits: Vale's package downloads its program when it runs,
and proselint has no list of one's own words.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from fp8doctor import cli
from tests.markdown import GENERATED, ROOT, split_sentences, text
from tests.not_said import not_said, phrases
from tests.readme import shown

FOR_DEVELOPERS = {"ARCHITECTURE.md", "layers.md", "sentences.md", "traps.md"}
FOLDERS = (
    *("analysis", "answer", "cli", "diagnosis", "health", "loading", "patching"),
    *("planning", "render", "trial", "worker"),
)
"""Packages whose strings are in the style."""

STORED = {"made up"}
"""Values of facts, as recordings have them."""

MOST_WORDS = 25


def faults(page: str) -> list[str]:
    """Name what a page has that its readers should not meet."""
    prose = re.sub(r"^\|.*\n", "\n", re.sub(GENERATED.format(r"\w+"), "", page, flags=re.S), flags=re.M)
    found = list(split_sentences(prose))
    long = [each for each in found if len(each.split()) > MOST_WORDS]
    return [*long, *(fault for each in found for fault in not_said(each))]


def of_pages() -> Iterator[tuple[str, list[str]]]:
    pages = [*("README.md", "CHANGELOG.md", "SECURITY.md", "examples/README.md")]
    pages += [f"docs/{each.name}" for each in (ROOT / "docs").glob("*.md") if each.name not in FOR_DEVELOPERS]
    pages += [f"docs/checks/{each.name}" for each in (ROOT / "docs/checks").glob("[A-Z]*[0-9].md")]
    for page in pages:  # the references of a check are names, versions and numbers
        yield page, faults(text(page).split("**References.**")[0])


def of_helps() -> Iterator[tuple[str, list[str]]]:
    for command in (cli.examine, *cli.main.commands.values()):
        helps = (command.help, command.epilog, *(option.help for option in shown(command)))
        for each in helps:
            yield f"--help of {command.name}", faults(re.sub(r"(\w+, ){5,}", "", each or ""))


def of_strings() -> Iterator[tuple[str, list[str]]]:
    """Yield the faults of strings, without the names of code in them."""
    modules = [each for folder in FOLDERS for each in (ROOT / "fp8doctor" / folder).rglob("*.py")]
    for module in (*modules, *(ROOT / "checks").rglob("*.py")):
        for phrase in {*phrases(module)} - STORED:
            yield str(module.relative_to(ROOT)), not_said(re.sub(r"`+[^`]*`+", "", phrase))


def test_what_users_read_is_in_the_style() -> None:
    found = [*of_pages(), *of_helps(), *of_strings()]
    assert len(found) > 1000
    assert [(place, each) for place, each in found if each] == []


@pytest.mark.parametrize("page", ["It is dear.\n", f"A {'word ' * 25}\n\n", "- fine\n- Mended, one\n"])
def test_faults_are_found(page: str) -> None:
    assert len(faults(page)) == 1
    assert faults("| dear |\n|---|\n\n```sh\ndear\n```\nShort `and dear` is fine.\n") == []
