"""The page and the fragment: well formed, closed to what a model calls its layers, readable by everybody."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8doctor import load_report
from fp8doctor.answer.sentences import box
from fp8doctor.render import markup
from fp8doctor.report import Report
from tests.accessible import faults
from tests.render.reports import LORA, SCREENS
from tests.render.sound_html import contrast, hold_sound, parsed, rules, text, variables
from tests.render.test_arbitrary_text import NASTY, with_name
from tests.render.test_screens import hold

DEMO = Path(markup.__file__).parents[1] / "demo.json.gz"


@pytest.fixture(scope="module")
def demo() -> Report:
    return load_report(DEMO)


def test_the_page_of_the_demo(demo: Report) -> None:
    hold("demo.html", demo.to_html())


@pytest.mark.parametrize("name", SCREENS)
def test_every_screen_is_a_sound_page_and_a_sound_fragment(name: str) -> None:
    assert faults(SCREENS[name].to_html()) == []
    for written in (SCREENS[name].to_html(), SCREENS[name]._repr_html_()):
        said = text(hold_sound(written))
        assert name == "environment" or text_of(box(SCREENS[name].answer).title.text) in said
        for finding in SCREENS[name].findings:
            assert finding.code in said


def text_of(prose: str) -> str:
    return " ".join(prose.split())


def test_a_fragment_styles_nothing_but_itself(demo: Report) -> None:
    selectors = [each for selector, _ in rules(demo._repr_html_()) for each in selector.split(",")]
    assert selectors
    assert all(".fp8doctor" in each for each in selectors)


TEXTS = ("text", "quiet", "bad", "good", "warning", "link")
"""Colours of letters; the others are of bars."""


def test_both_themes_have_contrast() -> None:
    """Letters 4.5 : 1 and bars 3 : 1 against what is behind them (WCAG 2.2, 1.4.3 and 1.4.11)."""
    dark, light, dark_in_notebooks = (
        found for _, body in rules(LORA.to_html()) if (found := variables(body))
    )
    assert dark == dark_in_notebooks
    assert set(dark) == set(light)
    for theme in (dark, light):
        for name, colour in theme.items():
            if name in TEXTS:
                assert min(contrast(colour, theme["ground"]), contrast(colour, theme["card"])) >= 4.5, name
            elif name not in ("ground", "card", "line"):
                assert contrast(colour, theme["ground"]) >= 3, name


names = st.one_of(
    st.sampled_from(
        (*NASTY, '"><img src=x onerror=alert(1)>', "' onload='x", "</style><script>", "{{ 7*7 }}")
    ),
    st.text(max_size=40),
    st.text(alphabet="אבגשלום \u202e\u2066\"'<>&\ud800\udfff\x00\ufffe", max_size=20),
)


@pytest.mark.slow
@given(names)
@settings(max_examples=25, deadline=None)
def test_no_name_gets_out_of_its_place(name: str) -> None:
    report = with_name(name)
    hold_sound(report.to_html())
    hold_sound(report._repr_html_())


def test_markup_in_a_name_is_shown_as_it_is() -> None:
    said = text(parsed(with_name('<script>alert("1")</script> {{ 7*7 }} &amp;').to_html()))
    assert '168 of 168 <script>alert("1")</script> {{ 7*7 }} &amp;' in said
