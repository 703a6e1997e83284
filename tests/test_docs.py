"""What the pages for contributors name is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("docs/ARCHITECTURE.md", "CONTRIBUTING.md", "checks/README.md", "tests/README.md")
FENCED = re.compile(r"^```.*?^```$", re.S | re.M)
PATH = re.compile(r"`((?:[\w.-]+/)+[\w.-]*|[\w-]+\.(?:md|cfg|toml|py))`")
"""In backticks, with a slash or a suffix. A name in capitals stands for what the reader will write."""


def words(code: str) -> str:
    """Code without its line breaks and indents."""
    return " ".join(code.split())


def text(page: str) -> str:
    return FENCED.sub("", (ROOT / page).read_text("utf-8"))


@pytest.mark.parametrize("page", PAGES)
def test_every_path_exists(page: str) -> None:
    paths = [each for each in PATH.findall(text(page)) if not re.search(r"\b(NAME|ROOM|AREA)\b", each)]
    assert len(paths) >= 5
    from_folder = (ROOT / page).parent
    assert [each for each in paths if not (ROOT / each).exists() and not (from_folder / each).exists()] == []


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_somewhere(page: str) -> None:
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text(page))
    from_folder = (ROOT / page).parent
    assert [each for each in links if "//" not in each and not (from_folder / each).exists()] == []


def test_what_is_quoted_from_a_file_stands_there() -> None:
    page = (ROOT / "checks/README.md").read_text("utf-8")
    quoted = re.findall(r"^<!-- from: (\S+) -->\n```\w+\n(.*?)^```$", page, re.S | re.M)
    assert len(quoted) >= 5
    assert [path for path, code in quoted if words(code) not in words((ROOT / path).read_text("utf-8"))] == []
