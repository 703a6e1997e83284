"""docs/checks/: a page for every check, and each says what its check says."""

from __future__ import annotations

import re
import shlex

from click.testing import CliRunner

from fp8doctor import cli
from tests import check_pages
from tests.markdown import FENCED
from tests.test_readme import parse as parse_command

PAGES = check_pages.pages()
SHELL = [
    line
    for page in PAGES.values()
    for block in FENCED.finditer(page)
    if block["language"] == "sh"
    for line in block["code"].splitlines()
]


def test_pages_are_what_the_checks_say() -> None:
    written = {path.name: path.read_text("utf-8") for path in check_pages.FOLDER.iterdir()}
    again = "python -m tests.check_pages writes them again"
    assert written.keys() == PAGES.keys(), again
    assert [name for name, page in PAGES.items() if written[name] != page] == [], again


def test_a_page_holds_every_word_of_the_docstring() -> None:
    """Escapes, marks and links of Markdown aside."""
    explained = CliRunner().invoke(cli.main, ["explain", "MOD007"]).stdout
    page = re.sub(r"\[(\w+)\]\(\w+\.md\)", r"\1", PAGES["MOD007.md"])
    told = [word.strip("<>*\\") for word in page.split()]
    assert all(word in told for word in explained.split("\n", 1)[1].split() if word.isalpha())


def test_every_line_of_code_is_fenced() -> None:
    for name, page in PAGES.items():
        if name != "README.md":
            prose = FENCED.sub("", page)
            assert not re.search(r"^ {4}", prose, re.M), name
            assert len(FENCED.findall(page)) >= 1, name


def test_lines_for_a_shell_are_whole() -> None:
    words = [shlex.split(line, comments=True) for line in SHELL]
    assert len(words) > 20
    for line in words:
        if line[:1] == ["fp8doctor"]:
            parse_command(shlex.join(line))


def test_what_markdown_reads_as_its_own_is_escaped() -> None:
    told = check_pages.prose("K <= 4 *or* `a*b` of __init__, some_name, [see] https://a.org/b_c_.\n- no list")
    assert told == (
        "K \\<= 4 \\*or\\* `a*b` of \\_\\_init\\_\\_, some_name, \\[see\\] <https://a.org/b_c_>.\n\\- no list"
    )
