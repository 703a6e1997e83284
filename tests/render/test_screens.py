"""Whole screens, as files in ``golden/``, and areas that are ticked only if their checks could answer.

``python -m tests.refresh screens`` writes the files again. Read the diff.
"""

from __future__ import annotations

import json as standard_json
import os
from pathlib import Path

import jsonschema
import msgspec
import pytest
from msgspec.structs import replace

from fp8doctor import registry
from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.diagnosis.document import schema
from fp8doctor.facts import Checkpointing, Facts, Training, recorded
from fp8doctor.finding import Outcome
from fp8doctor.render import markdown, text
from fp8doctor.render.details import calm_areas
from fp8doctor.render.words import Line
from fp8doctor.report import Report
from tests import replays
from tests.checks.arms import failed, ran, timed
from tests.render.reports import EAGER_DECODER, SCREENS

GOLDEN = Path(__file__).with_name("golden")

SHOWN = [name for name in SCREENS if name != "lora"]
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


PATIENTS = [f"patients h200-{name}" for name in "decoder_468m lora te_fused cast_heavy_layer".split()]
RECORDINGS = (*PATIENTS, "running h200x2-ddp_slow_rank")

TOP_LEVEL = [name for name in Facts.__struct_fields__ if name not in ("gaps", "unrecognized", "assumed_gpu")]


def areas_of(report: Report) -> tuple[Line, ...]:
    return calm_areas(report, {each.area for each in report.findings})


def unknown(report: Report) -> dict[str, str]:
    return {each.code: each.area for each in report.outcomes if each.outcome == "unknown"}


@pytest.mark.slow
@pytest.mark.parametrize("recording", RECORDINGS)
def test_what_nobody_saw_leaves_no_tick(recording: str) -> None:
    facts = replays.of(*recording.split()).report.facts
    before, became = unknown(diagnose(facts)), 0
    for name in TOP_LEVEL:
        if not recorded(facts, name) or name == "target":
            continue
        without = diagnose(replace(facts, **{name: msgspec.UNSET}))
        areas = {area for code, area in unknown(without).items() if code not in before}
        became += len(areas)
        ticked = {line.area for line in areas_of(without) if line.mark == "healthy"}
        assert not areas & ticked, f"without {name}"
    assert became


def test_an_area_of_which_nothing_applies_is_not_ticked() -> None:
    areas = areas_of(replays.of("patients", "h200-decoder_468m").report)
    assert {line.area: line.mark for line in areas} | {"lora": "not_applicable", "memory": "healthy"} == {
        line.area: line.mark for line in areas
    }
