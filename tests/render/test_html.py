"""The page and the fragment: well formed, closed to what a model calls its layers, readable by everybody."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from fp8doctor import load_report
from fp8doctor.facts import Blocks, Linear
from fp8doctor.render import html
from fp8doctor.render.detail_tables import MOST_ROWS, layer_table
from fp8doctor.render.details import details
from fp8doctor.render.environment_page import for_support
from fp8doctor.render.screen import first_screen
from fp8doctor.report import Report
from tests.accessible import faults
from tests.render.reports import LORA, SCREENS
from tests.render.sound_html import contrast, hold_sound, parsed, rules, text, variables
from tests.render.test_arbitrary_text import NASTY, with_name
from tests.render.test_screens import hold

DEMO = Path(html.__file__).parents[1] / "demo.json.gz"
LLAMA = Path(__file__).parents[1] / "patients" / "recorded" / "h200-llama_8b_float8.json.gz"


@pytest.fixture(scope="module")
def demo() -> Report:
    return load_report(DEMO)


def test_the_page_of_the_demo(demo: Report) -> None:
    hold("demo.html", html.render(demo))


def test_a_tooltip_says_what_the_bar_beside_it_says(demo: Report) -> None:
    root = parsed(html.render(demo))
    legends = [each for each in root.iter("ul") if each.get("class") == "legend"]
    assert any(True for each in legends for _ in each.iter("rect"))
    assert [found for each in legends for found in each.iter("title")] == [], "a swatch has no time"
    differences = [bar for bar in root.iter("li") if bar.find("svg/rect[@class='saving']") is not None]
    assert differences
    for bar in differences:
        value = bar.findtext("span[@class='value']", "")
        assert value.startswith("−")
        assert bar.findtext("svg/rect/title", "").endswith(f" {value} ms")


@pytest.mark.parametrize("name", SCREENS)
def test_every_screen_is_a_sound_page_and_a_sound_fragment(name: str) -> None:
    assert faults(html.render(SCREENS[name])) == []
    for written in (html.render(SCREENS[name]), SCREENS[name]._repr_html_()):
        said = text(hold_sound(written))
        assert text_of(first_screen(SCREENS[name]).answer.what) in said
        for finding in SCREENS[name].findings:
            assert finding.code in said


@pytest.mark.parametrize("name", SCREENS)
def test_a_page_tells_all_that_the_verbose_text_tells(name: str) -> None:
    report = SCREENS[name]
    screen, more = first_screen(report, whole=True), details(report)
    lines = [line.text for line in more.outcomes if line.mark != "unknown"]
    unknown = [line.codes for line in more.outcomes if line.mark == "unknown"]
    timed = (*more.timing.notes, *more.timing.differences, more.timing.basis) if more.timing else ()
    told = (
        *(*screen.job, *screen.machine, screen.made_up, more.not_looked_at, more.recorded),
        *(screen.ranks.lines if screen.ranks else ()),
        *(*more.counts, *more.gaps, *lines, *timed),
        *(part for each in more.entries for part in (each.code, each.name, each.saving, each.explanation)),
        *for_support(report.facts),
    )
    said = text(parsed(html.render(report)))
    assert [each for each in told if text_of(each) not in said] == []
    section = said.partition("What was not checked")[2].partition("What became of the other checks")[0]
    assert [codes for codes in unknown for code in codes if section.count(code) != 1] == []


def text_of(prose: str) -> str:
    return " ".join(prose.split())


def test_the_page_has_all_its_parts_in_order(demo: Report) -> None:
    root = hold_sound(html.render(demo))
    assert [text(each) for each in root.iter("h2")] == [
        "FP8 is 2.5x slower than BF16",
        "What to change",
        "The job",
        "Where the step goes",
        "What the difference is made of",
        "What else was found",
        "Spread and evidence",
        "Layer by layer",
        "What was not checked",
        "Environment",
    ]
    assert len(list(root.iter("h1"))) == 1
    assert "block.compile()" in text(next(root.iter("pre")))


def test_a_chart_says_in_words_what_it_draws(demo: Report) -> None:
    words = [text(svg.find("title")) for svg in parsed(html.render(demo)).iter("svg") if svg.get("role")]
    assert (
        "FP8 as you run it: 917.8 ± 14.4 ms (FP8 matmul 117.0, other matmul 15.9, casts 592.8, "
        "attention 33.0, other 135.6, idle 23.5)" in words
    )
    assert "BF16: 431.5 ± 8.1 ms (not profiled)" in words
    assert "casts +592.8 ms" in words


def test_the_bars_of_a_step_add_up_to_it(demo: Report) -> None:
    chart = html.view(demo).steps
    assert chart is not None
    for bar in chart.bars:
        step_ms = float(bar.value.partition(" ")[0])
        assert sum(each.length_ms for each in bar.segments) == pytest.approx(step_ms, abs=0.3)


def test_the_bars_of_a_difference_lead_from_one_step_to_the_other(demo: Report) -> None:
    for chart in html.view(demo).differences:
        against, *parts, of = chart.bars
        end_ms = against.segments[0].length_ms
        for part in parts:
            segment = part.segments[0]
            assert end_ms == pytest.approx(
                segment.start_ms if segment.kind == "cost" else segment.start_ms + segment.length_ms
            )
            end_ms += segment.length_ms if segment.kind == "cost" else -segment.length_ms
        assert end_ms == pytest.approx(of.segments[0].length_ms, abs=0.3)


def with_trial(report: Report, **facts: object) -> Report:
    trial = replace(report.facts.trial, **facts)
    return replace(report, facts=replace(report.facts, trial=trial))


def test_a_fragment_styles_nothing_but_itself(demo: Report) -> None:
    selectors = [each for selector, _ in rules(demo._repr_html_()) for each in selector.split(",")]
    assert selectors
    assert all(".fp8doctor" in each for each in selectors)


def test_a_notebook_does_not_lay_out_the_fragment(demo: Report) -> None:
    """Jupyter floats what a dl holds, and fixes the columns of tables, by rules of one class and elements."""
    styled = dict(rules(demo._repr_html_()))
    dl = next(body for selector, body in styled.items() if selector.startswith(".fp8doctor.fp8doctor dt"))
    table = styled[".fp8doctor.fp8doctor table"]
    assert "float: none; width: auto" in dl
    assert "table-layout: auto" in table
    assert "text-align: start" in styled[".fp8doctor.fp8doctor th, .fp8doctor.fp8doctor td"]


TEXTS = ("text", "quiet", "bad", "good", "warning", "link")
"""Colours of letters; the others are of bars."""


def test_both_themes_have_contrast() -> None:
    """Letters 4.5 : 1 and bars 3 : 1 against what is behind them (WCAG 2.2, 1.4.3 and 1.4.11)."""
    dark, light, dark_in_notebooks = (
        found for _, body in rules(html.render(LORA)) if (found := variables(body))
    )
    assert dark == dark_in_notebooks
    assert set(dark) == set(light)
    for theme in (dark, light):
        for name, colour in theme.items():
            if name in TEXTS:
                assert min(contrast(colour, theme["ground"]), contrast(colour, theme["card"])) >= 4.5, name
            elif name not in ("ground", "card", "line"):
                assert contrast(colour, theme["ground"]) >= 3, name


def test_black_on_white_has_the_contrast_that_the_standard_says() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)


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
    hold_sound(html.render(report))
    hold_sound(html.fragment(report))


def test_markup_in_a_name_is_shown_as_it_is() -> None:
    said = text(parsed(html.render(with_name('<script>alert("1")</script> {{ 7*7 }} &amp;'))))
    assert '168 of 168 <script>alert("1")</script> {{ 7*7 }} &amp;' in said


def llama_70b() -> Report:
    """A recorded Llama, with the layers of one of 70 billion parameters."""
    report = load_report(LLAMA)
    linears = report.facts.network.linears
    block = [each for each in linears if each.name.startswith("model.layers.0.")]
    many = tuple(
        replace(each, name=each.name.replace(".0.", f".{number}.", 1))
        for number in range(80)
        for each in block
    )
    network = replace(report.facts.network, linears=(*many, linears[-1]))
    return replace(report, facts=replace(report.facts, network=network))


@pytest.mark.slow
def test_the_layers_of_a_large_model_are_grouped() -> None:
    report = llama_70b()
    table = layer_table(report.facts)
    assert table is not None
    assert [(row.name, row.count) for row in table.groups[0].rows][:2] == [
        ("self_attn.q_proj", 80),
        ("self_attn.k_proj", 80),
    ]
    assert sum(row.count for group in table.groups for row in group.rows) == 561
    assert len(html.render(report).encode()) < 100_000


@pytest.mark.slow
def test_a_model_whose_layers_all_differ_still_fits_on_a_page() -> None:
    linears = tuple(
        Linear(name=f"blocks.{at}.x{at}", in_features=16 * at, out_features=16) for at in range(1, 401)
    )
    blocks = (Blocks(name="blocks", kind="m.Block", count=400),)
    facts = replace(LORA.facts, network=replace(LORA.facts.network, linears=linears, blocks=blocks))
    table = layer_table(facts)
    assert table is not None
    assert sum(len(group.rows) for group in table.groups) == MOST_ROWS
    assert table.left_out == "200 more kinds of layers."
