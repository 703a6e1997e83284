"""Every recorded report keeps what its readers rely on, in whatever words it says it."""

import itertools
import json
import math
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from fp8doctor.analysis.arms import uses_fp8
from fp8doctor.analysis.layer_gain import gains, losing
from fp8doctor.analysis.layers import to_convert
from fp8doctor.analysis.modelled_speedup import TAKES_NONE
from fp8doctor.analysis.significance import EVEN
from fp8doctor.analysis.treatment_table import STAY_IN_BF16, family, traits
from fp8doctor.answer.open_questions import UNCOMPILED
from fp8doctor.answer.verdict import invalidates
from fp8doctor.cli.fix import Script, placed
from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.diagnosis.estimate import Expected, changes_fp8_alone
from fp8doctor.diagnosis.plan import COMPILATION, converts_layers
from fp8doctor.facts import NOT_RECORDED, Facts, if_recorded, recorded
from fp8doctor.facts.no_number import why_of
from fp8doctor.finding import Saving
from fp8doctor.report import Report
from fp8doctor.trial.treatments import apply
from fp8doctor.trial.treatments.apply import CarriedOut
from tests.checks.rules import settings
from tests.recordings import ANSWERS, answer, text_of
from tests.render.every_format import hold_every_format
from tests.render.sound_screen import hold_screen, snippets
from tests.replays import ALL, TESTS, Replay, case, replayed
from tests.sound_times import hold_times, timed_pairs
from tests.test_fix_lines import contradictions, unresolved

SCHEMA = frozenset(
    "schema_version tool created_at facts verdict findings prescription outcomes next modelled_gpu".split()
)
MOST_CHARACTERS = 4 * 4000
"""Of the JSON for an agent: a token has about four."""

VERDICT = frozenset(
    "status speedup speedup_low speedup_high basis achievable_speedup step_ms summary".split()
)
"""Keys that programs read; more may stand beside them."""

WIDTHS = (60, 80, 100, 120)
EVERY_FORMAT = 8
"""Recordings of which one is written in every format."""

ANSWERED = dict(line.split("\t", 1) for line in ANSWERS.read_text("utf-8").splitlines())

SCRIPT = Script((TESTS.parent / "examples" / "plain_loop.py").read_bytes())


@pytest.mark.nightly
def test_no_estimate_takes_fp8_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`apply` and `fix`, with the times of each recording and without: FP8 goes only if that was timed."""
    stub = torch.nn.Linear(1, 1)
    monkeypatch.setattr(
        apply, "carry_out", lambda what, model, facts: CarriedOut(model, tuple(what), (), False)
    )
    gone = 0
    for recorded_report in (replayed(path).report for path in ALL):
        facts = replace(recorded_report.facts, trial=NOT_RECORDED)
        for plan in (recorded_report.prescription, Report.of(diagnose(facts)).prescription):
            with warnings.catch_warnings(action="ignore"):
                plan.apply(stub)
            said = capsys.readouterr().err
            measured = any(each.saving_ms and each.saving_ms.basis == "measured" for each in plan)
            measured |= any(each.get("breaks") == "step_raises" for each in plan)
            leaves = [each for each in plan if each.treatment.name == STAY_IN_BF16]
            assert (f"applied {STAY_IN_BF16}" in said) == (bool(leaves) and measured)
            assert len(said.splitlines()) + len([each for each in leaves if not measured]) == len(plan)
            assert not any(each.edit for each in placed(leaves, SCRIPT))
            gone += f"applied {STAY_IN_BF16}" in said
    assert gone > 20


@pytest.mark.parametrize("path", ALL, ids=case)
def test_a_recording(path: Path) -> None:
    found = replayed(path)
    assert answer(found.report) == ANSWERED[str(path.relative_to(TESTS))], (
        "python -m tests.refresh recordings"
    )
    the_facts_are_those_that_were_recorded(path, found.report)
    the_reasons_of_a_trial_are_not_read(found.report)
    programs_find_their_keys(found.report)
    layers_in_fp8_were_not_forgotten(found.report)
    the_verdict_is_on_the_side_of_its_speedup(found)
    savings_are_ranges(found.report)
    no_fix_undoes_another(found.report)
    no_doubtful_estimate_removes_fp8(found.report)
    a_missing_estimate_has_its_own_reason(found.report)
    a_variant_has_one_name(found)
    every_fix_says_what_it_rests_on(found)
    what_leaves_fp8_off_is_headed_by_the_error_that_it_ends(found.report)
    a_layer_that_loses_loses_in_its_row(found.report.facts)
    what_is_ignored_changes_no_time(found.report)
    hold_times(found)
    hold_screen(found, WIDTHS[ALL.index(path) % len(WIDTHS)])
    if ALL.index(path) % EVERY_FORMAT == 0:
        hold_every_format(found.report)


def what_is_ignored_changes_no_time(report: Report) -> None:
    """A time is of the job, whichever checks a user wants to see."""
    for code in {each.code for each in report.findings if invalidates(each)}:
        compared = diagnose(report.facts, ignore=(code,)).answer.compared
        for name in ("speedup", "now", "bf16", "fp8", "parts_ms"):
            assert getattr(compared, name) == getattr(report.answer.compared, name), (code, name)


def the_facts_are_those_that_were_recorded(path: Path, report: Report) -> None:
    data, read = json.loads(text_of(path))["facts"], report.to_dict()["facts"]
    for each in (data, read):  # an earlier version wrote null where nothing was seen
        if each.get("observed", {}).get("launch_ms", ()) is None:
            del each["observed"]["launch_ms"]
    assert read == data
    assert not [each for each in report.outcomes if each.outcome == "crashed"]


def the_reasons_of_a_trial_are_not_read(report: Report) -> None:
    """An answer rests on the kind of a reason. Recordings of before have its sentence alone."""
    facts = report.facts
    if recorded(facts, "trial"):
        arms = tuple(
            replace(each, why=why_of(each), reason=each.reason and "for another reason")
            for each in facts.trial.get("arms", ())
        )
        facts = replace(facts, trial=replace(facts.trial, why=why_of(facts.trial), arms=arms))
    again = diagnose(facts)
    assert [each.code for each in again.findings] == [each.code for each in report.findings]
    assert again.prescription == report.prescription
    assert again.verdict.status == report.verdict.status


def layers_in_fp8_were_not_forgotten(report: Report) -> None:
    """The check that looks for FP8 layers finds nothing if there are some, whoever asked for them."""
    (outcome,) = (each for each in report.outcomes if each.code == "MOD001")
    assert outcome.outcome == "silent" or not if_recorded(lambda: report.facts.network.fp8)


def programs_find_their_keys(report: Report) -> None:
    document = json.loads(report.to_json())
    assert document.keys() >= SCHEMA
    assert document["verdict"].keys() >= VERDICT
    assert report.to_json() == report.to_json()
    for_agents = report.to_json(facts=False)
    assert list(json.loads(for_agents))[:2] == ["schema_version", "verdict"]
    assert json.loads(for_agents).keys() == document.keys() - {"facts"}
    assert len(for_agents) <= MOST_CHARACTERS


def the_verdict_is_on_the_side_of_its_speedup(found: Replay) -> None:
    verdict = found.report.verdict
    low, high, speedup = verdict.speedup_low, verdict.speedup_high, verdict.speedup
    assert (low is None) == (high is None)
    assert speedup is None or low is None or low <= speedup <= high
    sides = {"fp8_slower": (0.0, 1.0), "fp8_even": (1 - EVEN, 1 + EVEN), "fp8_faster": (1.0, math.inf)}
    least, most = sides.get(verdict.status, (0.0, math.inf))
    assert least <= (least if speedup is None else speedup) <= most
    for bf16_ms, step_ms in timed_pairs(found.report):
        assert speedup == pytest.approx(round(bf16_ms, 1) / round(step_ms, 1))
    assert found.report.worst() != "error" or found.box.tone == "bad"


def savings_are_ranges(report: Report) -> None:
    savings = [each.saving_ms for each in (*report.findings, *report.prescription) if each.saving_ms]
    for each in savings:
        assert math.isfinite(each.low)
        assert each.low <= each.high
        assert not each.low == 0 < each.high or each.basis == "modelled", "a ceiling was not measured"
    treated: set[str] = set()
    for step in report.prescription:
        again = treated.intersection(step.treatment.layers)
        assert not again or (step.saving_ms or Saving(low=0, high=0, basis="rule")).low > 0, step
        treated.update(step.treatment.layers)
    compared = report.answer.compared
    if compared.now and compared.end and compared.gain and compared.gain.basis == "modelled":
        most_ms = compared.now.ms.value - compared.end.ms.low
        of_fixes = [each.saving_ms for each in report.answer.fixes if each.saving_ms]
        assert not [each for each in of_fixes if each.low < most_ms < each.high - 0.01]


def no_fix_undoes_another(report: Report) -> None:
    """Two ways to compile, two recipes, a fix of FP8 beside leaving it off, or two values of a setting."""
    names = [step.treatment.name for step in report.prescription]
    assert len({family(name) for name in names}) == len(names)
    lines = [line for step in report.prescription for line in step.treatment.code.splitlines()]
    assert contradictions(lines) == {}
    assert len({line for line in lines if line.startswith("convert_to_float8_training(model")}) <= 1
    assert [each for each in snippets(report) if unresolved(each)] == [], "a name from nowhere"
    for one, other in itertools.combinations(report.prescription, 2):
        said, again = (dict(_set_by(step.treatment.code)) for step in (one, other))
        assert all(again[name] == said[name] for name in said.keys() & again.keys()), (one, other)
    if STAY_IN_BF16 in names:
        others = [step for step in report.prescription if step.treatment.name != STAY_IN_BF16]
        assert not [step.treatment.name for step in others if changes_fp8_alone(step)]
        assert not {family(name) for name in names} & {"convert", "recipe", COMPILATION}


def no_doubtful_estimate_removes_fp8(report: Report) -> None:
    said = report.answer
    if said.leaves_fp8 and said.has_fp8 and not said.fault:
        assert said.speedup is not None
        assert said.speedup.side == "slower" or said.speedup.basis == "measured"
    if said.unchecked and not said.fixes and not said.fault:
        assert said.open, "an all-clear of what nobody checked"


def a_missing_estimate_has_its_own_reason(report: Report) -> None:
    """That a conversion takes nothing is the reason only if it is so."""
    facts = report.facts
    if not recorded(facts, "network.linears"):
        return
    takes = uses_fp8(facts) or to_convert(facts)
    assert not takes or TAKES_NONE not in (Expected(facts, ()).why_not, report.answer.unknown)


def a_variant_has_one_name(found: Replay) -> None:
    """What is open is called as in the list of variants, and no variant waits for one that was timed."""
    view, steps = found.view, found.report.answer.steps
    asked = [each.what for each in found.report.answer.open if each.what.endswith(" is untimed")]
    asked = [each for each in asked if UNCOMPILED not in each]
    names = {words.replace(",", "") for words in view.words.values()}
    for each in asked:
        words = each.removesuffix(" is untimed").replace(",", "")
        assert words in names, each
    timed = {view.words[each.name] for each in found.report.facts.arms() if each.get("tried")}
    told = steps.untimed if steps else ""
    assert not [words for words in timed if f"changes {words}, which has no time" in told]


def every_fix_says_what_it_rests_on(found: Replay) -> None:
    """A time, an estimate, or why it has none. What converts layers comes before what compiles them."""
    fixes = [each for each in found.report.answer.items if each.number]
    assert all(each.aside for each in fixes)
    codes = {each.name: each.code for each in found.report.findings}
    assert all(each.code == codes[each.name] for each in fixes if each.name in codes)
    names = [step.treatment.name for step in found.report.prescription]
    compiles = next((at for at, name in enumerate(names) if traits(name).compiles), len(names))
    assert not [*filter(converts_layers, names[compiles:])]


def what_leaves_fp8_off_is_headed_by_the_error_that_it_ends(report: Report) -> None:
    errors = {each.name: each.code for each in report.findings if each.severity == "error"}
    for step in report.prescription:
        ends = [errors[name] for name in step.names if name in errors]
        if step.treatment.name == STAY_IN_BF16 and ends:
            assert step.code in ends
            assert step.names[0] in errors


def a_layer_that_loses_loses_in_its_row(facts: Facts) -> None:
    """A layer that a finding calls too small costs time in its row."""
    gained, lost = if_recorded(gains, facts) or {}, if_recorded(losing, facts) or {}
    assert all(gained[name].ms < 0 for name in lost)


def _set_by(code: str) -> Iterator[tuple[str, str | None]]:
    for line in code.splitlines():
        yield from settings(line).items()
