"""Whole screens, as files in ``golden/``. After a change that was meant: UPDATE_GOLDEN=1 pytest tests/render,
and read the diff."""

from __future__ import annotations

import json as standard_json
import os
from pathlib import Path

import jsonschema
import pytest
from msgspec.structs import replace

from fp8doctor import registry
from fp8doctor.diagnosis.document import schema
from fp8doctor.facts import (
    Checkpointing,
    Facts,
    Training,
)
from fp8doctor.finding import Outcome, Saving
from fp8doctor.render import markdown, text
from fp8doctor.render.details import calm_areas, mark_of
from fp8doctor.render.terminal import columns
from tests.checks.arms import failed, ran, timed
from tests.facts_of import DECODER_468M
from tests.render.reports import EAGER_DECODER, SCREENS, UNALIGNED, report

GOLDEN = Path(__file__).with_name("golden")

SHOWN = [name for name in SCREENS if name not in ("compiled_decoder", "lora")]
"""Screens with a file of their own, one of each kind."""


def hold(name: str, screen: str) -> None:
    path = GOLDEN / name
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(screen, encoding="utf-8")
    held = path.read_text(encoding="utf-8") if path.exists() else ""
    assert screen == held, "python -m tests.refresh screens writes it again"


@pytest.mark.parametrize("name", SHOWN)
def test_text(name: str) -> None:
    hold(f"{name}.txt", text.render(SCREENS[name]))


def test_other_forms_of_a_screen() -> None:
    hold("eager_decoder.verbose.txt", text.render(EAGER_DECODER, verbose=True))
    hold("on_a_gpu.md", markdown.render(SCREENS["on_a_gpu"]))


@pytest.mark.slow
@pytest.mark.parametrize("name", SCREENS)
def test_json_holds_to_the_schema(name: str) -> None:
    document = SCREENS[name].to_json()
    jsonschema.validate(standard_json.loads(document), schema())
    assert document == SCREENS[name].to_json()


@pytest.mark.parametrize("width", [40, 60, 79, 100, 140])
@pytest.mark.parametrize("name", SCREENS)
def test_no_line_is_wider_than_asked_or_ends_in_blanks(name: str, width: int) -> None:
    lines = text.render(SCREENS[name], width=width, verbose=True).splitlines()
    code = {
        line
        for finding in SCREENS[name].findings
        if finding.treatment
        for line in finding.treatment.code.splitlines()
    }
    assert all(
        columns(line) <= width for line in lines if line.strip() not in {each.strip() for each in code}
    )
    assert all(line == line.rstrip() for line in lines)


@pytest.mark.parametrize("name", SCREENS)
def test_ascii_is_ascii_and_says_the_same(name: str) -> None:
    plain = text.render(SCREENS[name], ascii=True, verbose=True)
    assert plain.isascii()
    assert "[ok]" in plain or "[-]" in plain


@pytest.mark.slow
def test_colour_changes_nothing_but_colour() -> None:
    import re

    for each in SCREENS.values():
        assert re.sub(r"\x1b\[[0-9;]*m", "", text.render(each, colour=True, verbose=True)) == text.render(
            each, verbose=True
        )


def test_a_crashed_check_is_named() -> None:
    assert "check ENV001 crashed: KeyError: 'bf16'" in text.render(SCREENS["broken"])
    assert "check ENV001 crashed: KeyError: 'bf16'" in markdown.render(SCREENS["broken"])


def test_an_area_of_which_a_check_waits_for_a_trial_is_unknown() -> None:
    waits = {"outcome": "unknown", "reason": "nothing was timed", "missing": "trial"}
    outcomes = (
        Outcome(code="GPU001", area="device", **waits),
        Outcome(code="GPU005", area="device", outcome="not_applicable", reason="a GPU"),
        Outcome(code="CKP002", area="checkpointing", **waits),
    )
    waiting = replace(EAGER_DECODER, findings=(), prescription=(), outcomes=outcomes)
    assert {line.area: line.mark for line in calm_areas(waiting, set())} == {
        "device": "unknown",
        "checkpointing": "unknown",
    }


def test_an_area_is_not_healthy_where_the_budget_left_no_time_for_a_step_that_tells() -> None:
    arms = (
        failed("checkpointing-off", "the budget of 60 s would not have been enough for it"),
        ran("as_is"),
    )
    region = Checkpointing(name="blocks.0", form="wrapper", active=True)
    facts = timed(Facts(training=Training(checkpointing=(region,))), *arms)
    findings, outcomes = registry.run(registry.select(registry.discover(), ["CKP001"]), facts)
    assert findings == ()
    assert (outcomes[0].outcome, outcomes[0].missing) == ("unknown", "trial.arms.step_ms")
    assert outcomes[0].reason == ("checkpointing-off: the budget of 60 s would not have been enough for it")
    healthy = Outcome(code="CKP002", area="checkpointing", outcome="healthy")
    shown = replace(EAGER_DECODER, findings=(), prescription=(), outcomes=(healthy, *outcomes))
    assert [(line.area, line.mark) for line in calm_areas(shown, set())] == [("checkpointing", "unknown")]


@pytest.mark.parametrize(("low", "mark"), [(0.4, "bad"), (-0.1, "warning")])
def test_what_may_save_nothing_is_no_more_than_a_warning(low: float, mark: str) -> None:
    finding = replace(UNALIGNED, saving_ms=Saving(low=low, high=2.2, basis="measured", gpu="NVIDIA H200"))
    made = report(DECODER_468M, "", (finding,))
    assert mark_of(finding, made) == mark
