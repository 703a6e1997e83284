"""What the pages name is there: paths, links, headings, quoted code; and their tables are whole."""

from __future__ import annotations

import re
import runpy
from functools import cache
from pathlib import Path

import pytest

from tests.accessible import faults

ROOT = Path(__file__).resolve().parents[1]
PAGES = (
    "docs/ARCHITECTURE.md",
    "docs/layers.md",
    "docs/traps.md",
    "CONTRIBUTING.md",
    "checks/README.md",
    "tests/README.md",
)
EVERY_PAGE = sorted(
    str(path.relative_to(ROOT))
    for pattern in (
        "*.md",
        "docs/**/*.md",
        "checks/README.md",
        "examples/*.md",
        "tests/**/*.md",
        "research/**/*.md",
    )
    for path in ROOT.glob(pattern)
)
"""Those of the site: docs/conf.py names the same."""
FENCED = re.compile(r"^```.*?^```$", re.S | re.M)
PATH = re.compile(r"`((?:[\w.-]+/)+[\w.-]*|[\w-]+\.(?:md|cfg|toml|py))`")
"""In backticks, with a slash or a suffix. A name in capitals stands for what the reader will write."""


def words(code: str) -> str:
    """Code without its line breaks and indents."""
    return " ".join(code.split())


def text(page: str) -> str:
    return FENCED.sub("", (ROOT / page).read_text("utf-8"))


@cache
def headings(page: Path) -> set[str]:
    """The places in a page that a link can lead to, as GitHub names them."""
    titles = re.findall(r"^#+ (.*)$", FENCED.sub("", page.read_text("utf-8")), re.M)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES)
def test_every_path_exists(page: str) -> None:
    paths = [each for each in PATH.findall(text(page)) if not re.search(r"\b(NAME|ROOM|AREA)\b", each)]
    assert len(paths) >= 5
    from_folder = (ROOT / page).parent
    assert [each for each in paths if not (ROOT / each).exists() and not (from_folder / each).exists()] == []


THEMED = """<html lang="en"><head><title>t</title></head><body>
<aside class="sidebar-drawer"><p class="caption" role="heading"><span>Start</span></p></aside>
<article role="main"><h1>t<a href="#t">#</a></h1><pre>code</pre>
<div class="table-wrapper docutils container"><table><tr><th class="head"><p></p></th></tr></table></div>
</article></body></html>"""
"""What Sphinx 9 and furo 2025.12 write, in short."""


def test_the_site_gets_what_a_keyboard_and_a_screen_reader_need() -> None:
    accessible = runpy.run_path(str(ROOT / "docs/conf.py"))["accessible"]
    assert set(faults(THEMED)) == {
        "a heading by its role without aria-level",
        "<pre> that no keyboard can scroll",
        "<div> that no keyboard can scroll",
        "<th> without text",
    }
    assert faults(accessible(THEMED)) == []
    assert accessible(accessible(THEMED)) == accessible(THEMED)
    assert "python -m tests.accessible site" in (ROOT / ".github/workflows/docs.yml").read_text("utf-8")


@pytest.mark.parametrize(
    ("html", "fault"),
    [
        ("<html>", "<html> without lang"),
        ("<img src='a.svg'>", "<img> without alt: a.svg"),
        ("<h1>a</h1><h3>b</h3>", "<h3> after <h1>"),
        ("<h1>a</h1><h1>b</h1>", "more than one <h1>"),
        ("<a href='#'><svg></svg></a>", "<a> without text"),
        ("<input id='a'><label for='b'>b</label>", "<input> without a label: {'id': 'a'}"),
        ("<p tabindex='3'>a</p>", "a tabindex that changes the order"),
        ("<p>a</p>", "no <main>"),
    ],
)
def test_what_is_not_accessible(html: str, fault: str) -> None:
    assert fault in faults(html)


def test_every_link_leads_somewhere() -> None:
    lost = []
    for page in EVERY_PAGE:
        for path, place in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", text(page)):
            there = (ROOT / page).parent / path if path else ROOT / page
            found = "//" in path or (there.is_file() and (not place or place in headings(there)))
            lost += [] if found else [f"{page}: {path}#{place}"]
    assert lost == []


def test_the_site_is_built_of_these_pages() -> None:
    """`docs/conf.py` runs without the generator. Its patterns are those above, as Sphinx spells them."""
    patterns = runpy.run_path(str(ROOT / "docs/conf.py"))["include_patterns"]
    assert patterns == [
        "*.md",
        "docs/**.md",
        "checks/README.md",
        "examples/*.md",
        "tests/**.md",
        "research/**.md",
    ]
    workflow = (ROOT / ".github/workflows/docs.yml").read_text("utf-8")
    assert "python -m sphinx -W --keep-going -b html -c docs . site" in workflow, "a broken link is an error"
    assert {"README.md", "docs/index.md", "docs/checks/CMP001.md", "docs/errors/pytorch.md"} <= {*EVERY_PAGE}


def test_every_row_of_a_table_has_its_cells() -> None:
    tables = [(page, each) for page in EVERY_PAGE for each in re.findall(r"(?:^\|.*\n)+", text(page), re.M)]
    assert len(tables) > 50
    for page, table in tables:
        cells = [len(re.split(r"(?<!\\)\|", line)) for line in table.splitlines()]
        assert len(set(cells)) == 1, f"{page}: {table.splitlines()[0]}"
        assert re.fullmatch(r"\|( ?:?-+:? ?\|)+", table.splitlines()[1]), page


def test_what_is_quoted_from_a_file_stands_there() -> None:
    page = (ROOT / "checks/README.md").read_text("utf-8")
    quoted = re.findall(r"^<!-- from: (\S+) -->\n```\w+\n(.*?)^```$", page, re.S | re.M)
    assert len(quoted) >= 5
    assert [path for path, code in quoted if words(code) not in words((ROOT / path).read_text("utf-8"))] == []


UNPUBLISHED = re.compile(
    r"\b(uvx|pipx run|(pip|pipx|uv|uv tool|uv pip) (install|add))( -\S+)* ['\"]?fp8doctor\b(?! ?@)"
)
"""A command that would fetch fp8doctor by its name, which no index has: whoever takes it could run code."""


def test_no_page_installs_a_name_that_is_not_published() -> None:
    files = [
        path
        for folder in ("docs", "examples", "fp8doctor", "checks")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in {".md", ".py", ".ipynb", ".yml", ".jinja", ".toml"}
    ]
    files += [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    told = {path.name: found[0] for path in files if (found := UNPUBLISHED.search(path.read_text("utf-8")))}
    assert told == {}
    assert UNPUBLISHED.search("uvx fp8doctor model.py")
    assert UNPUBLISHED.search("pip install -U 'fp8doctor[torch]'")
    assert not UNPUBLISHED.search('pip install "fp8doctor @ git+$FP8DOCTOR"')
