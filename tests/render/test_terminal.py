"""Text on a terminal: where it breaks, and how numbers are written."""

import pytest

from fp8doctor.answer.job import quantity, short_version
from fp8doctor.render.terminal import printable_line, printable_lines, reflow, wrap
from fp8doctor.wording import percent


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a\n b\t c ", "a b c"),
        ("\x1b[31mred", "\ufffd[31mred"),
        ("a\x00b", "a\ufffdb"),
        ("a\u202eb", "a\ufffdb"),
        ("modèle", "modèle"),
        (" \n", ""),
    ],
)
def test_one_harmless_line(text: str, line: str) -> None:
    assert printable_line(text) == line


def test_blanks_of_every_kind_stay_in_code() -> None:
    assert printable_lines("a\xa0b\u202fc\u3000d\x1b") == ["a\xa0b\u202fc\u3000d\ufffd"]


def test_what_does_not_fit_is_broken_between_words_then_anywhere() -> None:
    assert wrap(["one two three"], 7) == ["one two", "three"]
    assert wrap(["abcdefgh"], 3) == ["abc", "def", "gh"]


PAGE = """\
A title

Prose that was
wrapped by hand.
https://example.org/an/address/that/is/longer/than/a/line
- an item of a list that goes on
  below itself

    if x:                      # code
        pad()
The end.
"""


def test_prose_is_wrapped_anew_and_code_lists_and_addresses_keep_their_lines() -> None:
    lines = PAGE.splitlines()
    prose, code = ["Prose that was", "wrapped by", "hand."], ["    # code", "    if x:"]
    assert list(reflow(PAGE, 15)) == [*lines[:2], *prose, *lines[4:8], *code, *lines[9:]]


def test_numbers_as_one_says_them() -> None:
    counts = {12: "12", 4_200: "4.2 k", 468_238_336: "468.2 M", 999_960_000: "1.00 B"}
    versions = {
        "2.11.0+cu130": "2.11",
        "2.13.1": "2.13.1",
        "2.13.0+cpu": "2.13+cpu",
        "0.18.0.dev2": "0.18.0.dev2",
    }
    shares = {
        100.0: "100%",
        86.4: "86%",
        9.96: "10%",
        2.31: "2.3%",
        0.038: "0.038%",
        1e-6: "< 0.01%",
        0.0: "0%",
    }
    for said, expected in ((quantity, counts), (short_version, versions), (percent, shares)):
        assert {each: said(each) for each in expected} == expected
