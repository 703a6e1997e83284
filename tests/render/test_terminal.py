"""Text on a terminal: what it is as wide as, where it breaks, what is left of it in ASCII."""

from __future__ import annotations

import pytest

from fp8doctor.render.terminal import columns, printable_line, printable_lines, reflow, to_ascii, wrap


@pytest.mark.parametrize(
    ("text", "width"), [("", 0), ("abc", 3), ("日本語", 6), ("ｆ８", 4), ("e\u0301", 1), ("−250 · ✗", 8)]
)
def test_columns(text: str, width: int) -> None:
    assert columns(text) == width


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


def test_code_keeps_its_indentation() -> None:
    assert printable_lines("\nfor x in y:\r\n\tx()  \n\n    z\x07\n") == [
        "for x in y:",
        "    x()",
        "",
        "    z\ufffd",
    ]


def test_ascii_grows_no_line() -> None:
    assert to_ascii("−250 · 日本 e\u0301\n✗ – \u0301") == "-250 | ?? e\n? -"


def test_items_stay_whole_where_they_fit() -> None:
    assert wrap(["compiled 0 of 24", "LoRA none"], 20, joint=" · ") == ["compiled 0 of 24", "LoRA none"]
    assert wrap(["compiled 0 of 24", "LoRA none"], 28, joint=" · ") == ["compiled 0 of 24 · LoRA none"]


def test_what_does_not_fit_is_broken_between_words_then_anywhere() -> None:
    assert wrap(["one two three"], 7) == ["one two", "three"]
    assert wrap(["abcdefgh"], 3) == ["abc", "def", "gh"]
    assert wrap(["日本語"], 5) == ["日本", "語"]


PAGE = """\
A title

Prose that was
wrapped by hand, with https://example.org/an/address/that/is/longer/than/a/line in it.
- an item of a list that goes on
  below itself
- another item

    x = 1                                # before
    if x:
        pad()                            # after

    y = 1   # short
The end.
"""


def test_prose_is_wrapped_anew_and_code_and_lists_keep_their_lines() -> None:
    assert list(reflow(PAGE, 30)) == [
        "A title",
        "",
        "Prose that was wrapped by",
        "hand, with",
        "https://example.org/an/address/that/is/longer/than/a/line",
        "in it.",
        "- an item of a list that goes",
        "  on below itself",
        "- another item",
        "",
        "    # before",
        "    x = 1",
        "    if x:",
        "        # after",
        "        pad()",
        "",
        "    y = 1   # short",
        "The end.",
        "",
    ]
