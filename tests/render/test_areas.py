"""No area is ticked whose checks could not answer."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.facts import Facts, recorded
from fp8doctor.finding import Outcome
from fp8doctor.registry import why_missing
from fp8doctor.render.details import calm_areas, details
from fp8doctor.render.words import Line
from fp8doctor.report import Report, load_report
from tests.recordings import name_of
from tests.render.reports import EAGER_DECODER
from tests.test_recorded import RECORDED

NAMES = ("decoder_468m", "lora", "te_fused", "cast_heavy_layer", "fsdp2_float8")
WATCHED = Path(__file__).parents[1] / "running" / "recorded"
PATHS = [*(RECORDED / f"h200-{name}.json.gz" for name in NAMES), WATCHED / "h200x2-ddp_slow_rank.json.gz"]

TOP_LEVEL = [name for name in Facts.__struct_fields__ if name not in ("gaps", "unrecognized", "assumed_gpu")]


def areas_of(report: Report) -> tuple[Line, ...]:
    return calm_areas(report, {each.area for each in report.findings})


def unknown(report: Report) -> dict[str, str]:
    return {each.code: each.area for each in report.outcomes if each.outcome == "unknown"}


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS, ids=name_of)
def test_what_nobody_saw_leaves_no_tick(path: Path) -> None:
    facts = load_report(path).facts
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
    areas = areas_of(load_report(RECORDED / "h200-decoder_468m.json.gz"))
    assert {line.area: line.mark for line in areas} | {"lora": "not_applicable", "memory": "healthy"} == {
        line.area: line.mark for line in areas
    }


def test_what_was_not_looked_at_keeps_every_reason() -> None:
    facts = replace(EAGER_DECODER.facts, gaps={"trial.y": "no GPU here", "trial.z": "no GPU here."})

    def lacks(code: str, path: str, reason: str = "") -> Outcome:
        told = reason or why_missing(facts, path)
        return Outcome(code=code, area="memory", outcome="unknown", reason=told, missing=path)

    outcomes = (
        lacks("MEM001", "training.x"),
        lacks("MEM002", "trial.y"),
        lacks("MEM003", "trial.z"),
        lacks("MEM004", "training.w"),
        lacks("MEM005", "trial.arms.step_ms", "cache-off: no time was left for it"),
    )
    found = details(replace(EAGER_DECODER, facts=facts, outcomes=outcomes))
    assert found.not_looked_at.endswith(
        "MEM001 MEM004 (not recorded: training.x, training.w), MEM002 MEM003 (no GPU here), "
        "MEM005 (cache-off: no time was left for it)."
    )
    assert found.unanswered == {outcome.code for outcome in outcomes}
