"""docs/errors/: each known message has a heading, its cause and its fix on the page of its library."""

from __future__ import annotations

import re

from fp8doctor.known_errors import known_errors
from tests import check_pages, error_pages

PAGES = error_pages.pages()


def test_pages_are_what_the_table_says() -> None:
    written = {path.name: path.read_text("utf-8") for path in error_pages.FOLDER.iterdir()}
    again = "python -m tests.error_pages writes them again"
    assert written.keys() == PAGES.keys(), again
    assert [name for name, page in PAGES.items() if written[name] != page] == [], again


def test_every_message_has_one_heading_and_its_words() -> None:
    headings = [line for page in PAGES.values() for line in page.splitlines() if line.startswith("## ")]
    assert sorted(headings) == sorted(f"## {check_pages.prose(each.says)}" for each in known_errors())
    for error in (each.filled({}) for each in known_errors()):
        page = PAGES[f"{error_pages.file_name(error.library)}.md"]
        assert check_pages.prose(error.cause) in page
        assert error.lines.strip("\n") in page


def test_every_link_leads_to_a_page() -> None:
    for page in PAGES.values():
        for path in re.findall(r"\]\(([^)]+\.md)\)", page):
            assert (error_pages.FOLDER / path).exists(), path
