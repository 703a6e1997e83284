"""Text on a terminal: what it is as wide as, where it breaks, and how numbers are written."""

from __future__ import annotations

import pytest

from fp8doctor.finding import Saving
from fp8doctor.render.details import saving_in_words
from fp8doctor.render.header import quantity, short_version
from fp8doctor.render.terminal import columns, printable_line, reflow, wrap
from fp8doctor.wording import percent


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


def test_numbers_as_one_says_them() -> None:
    assert [quantity(count) for count in (12, 4_200, 468_238_336, 999_960_000, 8_030_261_248)] == [
        "12",
        "4.2 k",
        "468.2 M",
        "1.00 B",
        "8.03 B",
    ]
    assert [
        short_version(version) for version in ("2.11.0+cu130", "2.13.1", "2.13.0+cpu", "0.18.0.dev2026")
    ] == [
        "2.11",
        "2.13.1",
        "2.13+cpu",
        "0.18.0.dev2026",
    ]
    assert [percent(share) for share in (100.0, 86.4, 9.96, 2.31, 0.038, 1e-6, 0.0)] == [
        "100%",
        "86%",
        "10%",
        "2.3%",
        "0.038%",
        "< 0.01%",
        "0%",
    ]


@pytest.mark.parametrize(
    ("saving", "words"),
    [
        (None, ""),
        (Saving(low=float("nan"), high=1.0, basis="measured"), ""),
        (
            Saving(low=250.2, high=330.4, basis="modelled", gpu="H200"),
            "−250 to −330 ms/step, estimated for H200",
        ),
        (
            Saving(low=278.0, high=278.4, basis="measured", gpu="NVIDIA H200"),
            "−278 ms/step, measured on NVIDIA H200",
        ),
        (
            Saving(low=-3.0, high=4.0, basis="measured", gpu="NVIDIA H200"),
            "+3.0 to −4.0 ms/step, measured on NVIDIA H200",
        ),
        (Saving(low=0.01, high=0.02, basis="rule"), "0.0 ms/step, by rule"),
        (
            Saving(low=1234.0, high=2000.0, basis="modelled", gpu="RTX4090"),
            "−1,234 to −2,000 ms/step, estimated for RTX4090",
        ),
    ],
)
def test_a_saving_is_the_change_of_a_step_with_its_basis(saving: Saving | None, words: str) -> None:
    assert saving_in_words(saving) == words
