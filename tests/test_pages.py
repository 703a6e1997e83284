"""What users read: written in the style, true of the program, and its links, examples and tables whole."""

import ast
import re
import runpy
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from fp8doctor.cli.pages import DEMO
from fp8doctor.report import load_report
from tests import check_pages, error_pages, picture, readme
from tests.markdown import FENCED, GENERATED, ROOT, split_sentences, text, written_by_hand

AGAIN = "python -m tests.refresh writes it again"
FOR_DEVELOPERS = {f"docs/{name}.md" for name in ("ARCHITECTURE", "layers", "sentences", "traps")}
FOR_USERS = [each for each in written_by_hand() if each not in {*FOR_DEVELOPERS, "docs/BELIEFS.md"}]
EVERY_PAGE = sorted(
    str(path.relative_to(ROOT))
    for pattern in runpy.run_path(str(ROOT / "docs/conf.py"))["include_patterns"]
    for path in ROOT.glob(pattern.replace("**.md", "**/*.md"))
)


# Style

NOT_SAID = {
    r"\b[Dd]iseases?\b": "finding, problem",
    r"\b[Ss]ick\b": "affected",
    r"\b[Mm]end(s|ed|ing)?\b": "fix, solve",
    r"\b[Cc]ure[sd]?\b": "fix, solve",
    r"\b[Ll]edger\b": "table, breakdown",
    r"(?<![.\w])[Aa]rms?\b": "variant",
    r"\b[Rr]ooms?\b": "memory, time, space",
    r"\b[Tt]old\b": "said, shown",
    r"\b[Dd]ear(er|est)?\b": "slower, more expensive",
    r"\b[Mm]ade[- ]up\b": "random, synthetic",
    r"\bheld to\b": "checked against",
    r"\b[Ee]agerly\b": "not compiled",
    r"\b[Bb]eside\b": "next to, with",
    r"\b[Aa]new\b": "again",
    r"\b[Hh]angs? on\b": "depends on",
    r"\bGEMMs?\b": "matmul",
    r"×": "x",
    r"(?<=[\d}]) %": "93%, without a space",
}
"""What no user reads -> what to say instead."""
MOST_WORDS = 25
STORED = {"made up"}
"""Values of facts, as recordings have them."""
IN_STYLE = "analysis answer cli diagnosis health loading planning render trial worker".split()
"""Packages whose strings users read."""


def not_said(words: str) -> list[str]:
    return [
        f"{found[0]!r} in {words[max(0, found.start() - 30) : found.end() + 30]!r}: say {instead}"
        for pattern, instead in NOT_SAID.items()
        if (found := re.search(pattern, words))
    ]


def faults(page: str) -> list[str]:
    """Name the long sentences and the words that are not said; no code, tables or names of rules."""
    written = re.sub(GENERATED.format(r"\w+"), "", page, flags=re.S)
    by_hand = re.sub(r"^(\||`[\w-]+` · ).*\n", "\n", written, flags=re.M)
    found = list(split_sentences(by_hand))
    long = [each for each in found if len(each.split()) > MOST_WORDS]
    return [*long, *(fault for each in found for fault in not_said(each))]


def phrases(path: Path) -> Iterator[str]:
    """Yield docstrings and texts of a file, with a hole for each value and without names of code."""
    tree = ast.parse(path.read_text("utf-8"))
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        said = ""
        if isinstance(node, ast.JoinedStr):
            said = "".join(
                str(each.value) if isinstance(each, ast.Constant) else "{}" for each in node.values
            )
        elif isinstance(node, ast.Constant) and id(node) not in parts and " " in str(node.value):
            said = str(node.value)
        if said not in STORED:
            yield re.sub(r"`+[^`]*`+", "", said)


def test_what_users_read_is_in_the_style() -> None:
    pages = [*FOR_USERS, "CHANGELOG.md", "SECURITY.md", "examples/README.md"]
    pages += [f"docs/checks/{each.name}" for each in (ROOT / "docs/checks").glob("[A-Z]*[0-9].md")]
    said = {page: faults(text(page).split("**References.**")[0]) for page in pages}
    for command in readme.COMMANDS.values():
        helps = (command.help, command.epilog, *(option.help for option in readme.shown(command)))
        said[f"{command.name} --help"] = [
            fault for each in helps for fault in faults(re.sub(r"(\w+, ){5,}", "", each or ""))
        ]
    modules = [each for folder in IN_STYLE for each in (ROOT / "fp8doctor" / folder).rglob("*.py")]
    for module in (*modules, *(ROOT / "checks").rglob("*.py")):
        said[str(module)] = [fault for phrase in phrases(module) for fault in not_said(phrase)]
    assert {place: each for place, each in said.items() if each} == {}
    assert len(said) > 200
    assert (
        len(faults(f"It is dear.\n\n- A {'word ' * 25}\n\n```sh\ndear\n```\nShort `and dear` is fine.\n"))
        == 2
    )


# What the program says

PARTS = [(page, name) for page, parts in readme.PARTS.items() for name in parts]


@pytest.mark.slow
@pytest.mark.parametrize(("page", "name"), PARTS, ids=lambda each: each)
def test_a_generated_part_is_what_the_program_says(page: str, name: str) -> None:
    made = readme.PARTS[page][name]()
    if name == "screen" and "no GPU;" not in made:
        pytest.skip("the page shows a machine without a GPU")
    assert readme.without_versions(readme.written(page, name)) == readme.without_versions(made), AGAIN


def test_generated_files_are_what_the_program_says() -> None:
    assert text(readme.LLMS) == readme.llms(), AGAIN
    for folder, pages in (
        (check_pages.FOLDER, check_pages.pages()),
        (error_pages.FOLDER, error_pages.pages()),
    ):
        written = {path.name: path.read_text("utf-8") for path in folder.iterdir()}
        assert written.keys() == pages.keys(), AGAIN
        assert [name for name, page in pages.items() if written[name] != page] == [], AGAIN


def test_the_picture_is_of_what_demo_prints_and_loads_nothing() -> None:
    drawn = text(readme.PICTURE)
    assert picture.shown(drawn) == picture.shown(picture.picture()), AGAIN
    assert set(re.findall(r"(?:https?:|//)[^\s\"']*", drawn)) == {"http://www.w3.org/2000/svg"}
    assert all(place.startswith("#") for place in re.findall(r"url\((.*?)\)", drawn))
    facts = load_report(DEMO).facts
    versions = (facts.software.torch, str(facts.software.packages["torchao"].version))
    torch, torchao = (".".join(version.split(".")[:2]) for version in versions)
    caption = " ".join(text("README.md").split(f"({readme.PICTURE})")[1].split("\n\n")[1].split())
    assert f"one {facts.gpus[0].name} (torch {torch}, torchao {torchao})" in caption


# Paths, links, tables, quotes

PATH = re.compile(r"`((?:[\w.-]+/)+[\w.-]*|[\w-]+\.(?:md|cfg|toml|py))`")
WITH_PATHS = (
    *FOR_DEVELOPERS - {"docs/sentences.md"},
    "CONTRIBUTING.md",
    "checks/README.md",
    "tests/README.md",
)
OF_THE_PROJECT = re.compile(r"`((?:checks|tests|research|fp8doctor)/[\w./]+)`")


def test_every_path_exists() -> None:
    """A name in capitals stands for what the reader will write."""
    named = [(page, each) for page in WITH_PATHS for each in PATH.findall(FENCED.sub("", text(page)))]
    named += [(page, each) for page in FOR_USERS for each in OF_THE_PROJECT.findall(text(page))]
    there = [each for each in named if not re.search(r"\b(NAME|ROOM|AREA)\b", each[1])]
    assert len(there) > 100
    lost = [
        each for each in there if not any((at / each[1]).exists() for at in (ROOT, (ROOT / each[0]).parent))
    ]
    assert lost == []


@cache
def headings(page: Path) -> set[str]:
    """The places in a page that a link can lead to, as GitHub names them."""
    titles = re.findall(r"^#+ (.*)$", FENCED.sub("", page.read_text("utf-8")), re.M)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_every_link_leads_somewhere() -> None:
    lost = []
    for page in [*EVERY_PAGE, readme.LLMS]:
        for path, place in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", FENCED.sub("", text(page))):
            there = (ROOT / page).parent / path if path else ROOT / page
            found = "//" in path or (there.is_file() and (not place or place in headings(there)))
            lost += [] if found else [f"{page}: {path}#{place}"]
    assert lost == []
    linked = [f"docs/{page}" for page in re.findall(r"\]\(([^)#]+)", text("docs/index.md"))]
    assert {*written_by_hand(), "docs/checks/README.md"} - {"README.md", "docs/index.md"} <= {*linked}
    assert len(linked) == len(set(linked)), "a page has one place in the sidebar"


def test_every_row_of_a_table_has_its_cells() -> None:
    tables = [
        (page, each)
        for page in EVERY_PAGE
        for each in re.findall(r"(?:^\|.*\n)+", FENCED.sub("", text(page)), re.M)
    ]
    assert len(tables) > 50
    for page, table in tables:
        cells = [len(re.split(r"(?<!\\)\|", line)) for line in table.splitlines()]
        assert len(set(cells)) == 1, f"{page}: {table.splitlines()[0]}"
        assert re.fullmatch(r"\|( ?:?-+:? ?\|)+", table.splitlines()[1]), page


def test_what_is_quoted_from_a_file_stands_there() -> None:
    quoted = re.findall(r"^<!-- from: (\S+) -->\n```\w+\n(.*?)^```$", text("checks/README.md"), re.S | re.M)
    assert len(quoted) >= 5
    lost = [path for path, code in quoted if " ".join(code.split()) not in " ".join(text(path).split())]
    assert lost == []


UNPUBLISHED = re.compile(
    r"\b(uvx|pipx run|(pip|pipx|uv|uv tool|uv pip) (install|add))( -\S+)* ['\"]?fp8doctor\b(?! ?@)"
)
"""A command that would fetch fp8doctor by its name, which no index has: whoever takes it could run code."""


def test_no_page_installs_a_name_that_is_not_published() -> None:
    kinds = {".md", ".py", ".ipynb", ".yml", ".jinja", ".toml"}
    files = [
        path
        for folder in ("docs", "examples", "fp8doctor", "checks")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in kinds
    ]
    files += [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    assert [path.name for path in files if UNPUBLISHED.search(path.read_text("utf-8"))] == []
    assert UNPUBLISHED.search("pip install -U 'fp8doctor[torch]'")
    assert not UNPUBLISHED.search('pip install "fp8doctor @ git+$FP8DOCTOR"')
