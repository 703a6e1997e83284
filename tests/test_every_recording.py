"""Every recorded report keeps what its readers rely on, in whatever words it says it."""

import itertools
import json
import math
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import Struct
from msgspec.structs import replace

from fp8doctor import registry
from fp8doctor.analysis.arms import all_changes, changes_in_bf16, uses_fp8
from fp8doctor.analysis.compile_coverage import own_compile
from fp8doctor.analysis.layer_gain import gains, losing
from fp8doctor.analysis.layers import to_convert
from fp8doctor.analysis.memory import Fit
from fp8doctor.analysis.modelled_speedup import TAKES_NONE
from fp8doctor.analysis.noise import SELF_CHECK_TOLERANCE, speed
from fp8doctor.analysis.significance import EVEN
from fp8doctor.analysis.treatment_table import COMPILE_BLOCKS, STAY_IN_BF16, family, traits
from fp8doctor.analysis.trial_view import TrialView, Variant
from fp8doctor.answer.open_questions import UNCOMPILED
from fp8doctor.answer.sentences import PARTS
from fp8doctor.answer.steps import COLUMNS
from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.diagnosis.engagement import invalidates
from fp8doctor.diagnosis.estimate import Expected, changes_fp8_alone
from fp8doctor.diagnosis.plan import COMPILATION, CONVERTS
from fp8doctor.facts import Arm, Facts, if_recorded, recorded
from fp8doctor.facts.arm_names import (
    BASELINES,
    BF16_BASELINES,
    ArmName,
    is_conversion,
    is_in_bf16,
    is_withdrawn,
)
from fp8doctor.facts.no_number import why_of
from fp8doctor.facts.unrecorded import NOT_RECORDED
from fp8doctor.finding import Saving
from fp8doctor.patching import Script, placed
from fp8doctor.render import text
from fp8doctor.render.page import Marks, Next
from fp8doctor.render.report_page import page
from fp8doctor.report import Report
from fp8doctor.trial.treatments import apply
from fp8doctor.trial.treatments.apply import CarriedOut
from tests.checks.rules import settings
from tests.recordings import ANSWERS, answer, text_of
from tests.render.every_format import CELL, hold_every_format
from tests.render.sound_html import hold_sound
from tests.replays import ALL, TESTS, Replay, case, replayed
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

EXPLAIN = re.compile(r"fp8doctor explain ((?:[A-Z]{3,5}\d{3} ?)+)")

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
    parts_add_up(found)
    a_name_has_one_value(found)
    savings_are_ranges(found.report)
    no_fix_undoes_another(found.report)
    no_doubtful_estimate_removes_fp8(found.report)
    a_missing_estimate_has_its_own_reason(found.report)
    a_variant_has_one_name(found)
    every_fix_says_what_it_rests_on(found)
    what_leaves_fp8_off_is_headed_by_the_error_that_it_ends(found.report)
    a_layer_that_loses_loses_in_its_row(found.report.facts)
    every_format_is_sound(found, WIDTHS[ALL.index(path) % len(WIDTHS)])
    if ALL.index(path) % EVERY_FORMAT == 0:
        hold_every_format(found.report)
    a_screen_agrees_with_itself(found)
    numbers_of_the_box_are_those_of_the_answer(found)
    the_fastest_fp8_is_the_fastest(found.view)
    what_is_ignored_changes_no_time(found.report)
    a_gain_is_the_time_now_over_the_end(found)
    assert (found.view.end is not None) == timed(found.view)
    if found.view.end:
        a_plan_arrives_where_it_says(found, found.view.end)


def timed(view: TrialView) -> bool:
    """Return whether a trial timed the step as it is and a BF16 on a GPU."""
    return view.on_gpu and view.as_is is not None and view.bf16 is not None


def a_plan_arrives_where_it_says(found: Replay, end: Variant) -> None:
    """Carried out, it takes the time that it promises; nothing that was timed is faster."""
    report, view = found.report, found.view
    names = {step.treatment.name for step in report.prescription}
    done = {name for each in view.facts.trial.arms for name in each.get("treatments", ()) if each.tried}
    assert end.arm in carried_out(names & (done | {STAY_IN_BF16}), view)
    saved = [each.saving_ms for each in report.prescription if each.saving_ms]
    whole = round(view.as_is.ms.value, 1) - round(end.arm.step_ms, 1)
    assert sum(each.middle for each in saved if each.basis == "measured") == pytest.approx(whole, abs=0.01)
    rows = {row.step for row in found.rows}
    assert {f"{each.to_ms:,.1f}" for each in saved if each.basis == "measured"} <= rows
    for each in (each for each in view.facts.trial.arms if each.tried and each.step_ms):
        if each.name in BASELINES or is_in_fp8(each):
            alike = end.is_as_is or end.in_fp8 == is_in_fp8(each)
            hidden = alike and speed(each, end.arm, view.facts.trial).low <= 1
            broken = each.get("non_finite") and view.bf16.is_finite
            assert hidden or broken or each.step_ms * (1 + SELF_CHECK_TOLERANCE) >= end.arm.step_ms, each.name


def the_fastest_fp8_is_the_fastest(view: TrialView) -> None:
    """Of those that train without NaN, if BF16 does."""
    totals = [each for each in view.facts.arms() if each.tried and each.step_ms and is_in_fp8(each)]
    if not (timed(view) and view.uses_fp8 and totals):
        return
    sound = [each for each in totals if not (view.bf16.is_finite and each.get("non_finite"))]
    fastest = min(sound, key=lambda each: each.step_ms or 0.0, default=None)
    assert (view.fp8 and view.fp8.arm) == fastest


def what_is_ignored_changes_no_time(report: Report) -> None:
    """A time is of the job, whichever checks a user wants to see."""
    for code in {each.code for each in report.findings if invalidates(each)}:
        compared = diagnose(report.facts, ignore=(code,)).answer.compared
        for name in ("speedup", "now", "bf16", "fp8", "parts_ms"):
            assert getattr(compared, name) == getattr(report.answer.compared, name), (code, name)


def a_gain_is_the_time_now_over_the_end(found: Replay) -> None:
    compared = found.report.answer.compared
    if compared.gain and compared.now and compared.end:
        ratio = compared.now.ms.value / compared.end.ms.value
        assert compared.gain.value == pytest.approx(ratio, rel=0.01)


def is_in_fp8(each: Arm) -> bool:
    """A total that a user could run, in its last window."""
    parts = (
        is_in_bf16(each.name)
        or is_withdrawn(each.name, *each.treatments)
        or each.name == ArmName.WITHOUT_ADAPTERS
    )
    return not parts and (each.name == ArmName.AS_IS or bool(each.get("treatments")))


def carried_out(names: set[str], view: TrialView) -> list[Arm]:
    """The variants that these treatments make of the step as it is."""
    arms = [each for each in view.facts.trial.arms if each.tried and each.step_ms]
    if STAY_IN_BF16 in names or not view.uses_fp8:
        compiles = any(traits(name).compiles for name in names)
        converts = {name for name in names if family(name) == "convert"}
        if converts:
            own = {COMPILE_BLOCKS} if own_compile(view.facts) == "blocks" else set()
            made = names | own
            return [each for each in arms if is_conversion(each.name) and made.issuperset(each.treatments)]
        rest = {name for name in names if traits(name).helps_bf16_too and family(name) != COMPILATION}
        alike = [each for each in arms if rest and changes_in_bf16(each) == rest]
        forms = BF16_BASELINES if STAY_IN_BF16 in names or compiles else BASELINES
        return alike or [each for each in arms if each.name in forms]
    return [each for each in arms if is_in_fp8(each) and {*all_changes(view.facts.trial, each)} == names]


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


def timed_pairs(report: Report) -> list[tuple[float, float]]:
    """The times of the verdict, best BF16 first, if a trial measured both."""
    said = report.verdict
    measured = said.basis == "measured" and said.speedup is not None
    return [(said.bf16_step_ms, said.step_ms)] if measured and said.bf16_step_ms and said.step_ms else []


def parts_add_up(found: Replay) -> None:
    compared = found.report.answer.compared
    if compared.parts_ms and compared.speedup:
        longer = compared.fp8.ms.value - compared.bf16.ms.value
        assert sum(compared.parts_ms.values()) == pytest.approx(longer, rel=0.02, abs=0.1)
    for each in found.report.facts.arms():
        profile = each.get("breakdown") if each.tried else None
        if profile and each.step_ms:
            parts = sum(profile.families_ms.values()) + profile.idle_ms
            assert parts == pytest.approx(each.step_ms, rel=0.01)
            assert profile.unclassified_pct <= 1, "a rule knows every kernel"


COLUMNS_OF = {
    "matmuls": ("FP8 matmul", "other matmul"),
    "idle GPU": ("idle",),
    "casts": ("casts",),
    "attention": ("attention",),
    "other": ("other",),
}
"""Part of the difference -> the columns of the table of parts with its name."""


def a_name_has_one_value(found: Replay) -> None:
    """A part of the difference is that of the table of parts, if it has the same name there."""
    said = found.report.answer
    profiled = {each.ms: dict(zip(COLUMNS, each.parts_ms, strict=False)) for each in found.rows}
    pair = [profiled.get(each.ms.value) for each in (said.compared.fp8, said.compared.bf16) if each]
    if said.speedup is None or said.speedup.basis != "measured" or len(pair) < 2 or not all(pair):
        return
    fp8, bf16 = pair
    for name, ms in said.parts_ms.items():
        if columns_of := COLUMNS_OF.get(PARTS.get(name, name)):
            assert ms == pytest.approx(sum(fp8[each] - bf16[each] for each in columns_of), abs=0.02), name


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
    assert not [name for name in names[compiles:] if name.startswith(CONVERTS)]


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


def every_format_is_sound(found: Replay, width: int) -> None:
    report = found.report
    code = {line.strip() for each in snippets(report) for line in each.splitlines()}
    plain, verbose = (
        text.render(report, width=width),
        text.render(report, width=width, verbose=True, ascii=True),
    )
    lines = [line for line in f"{plain}{verbose}".splitlines() if line.strip() not in code]
    assert not [line for line in lines if len(line) > width or line != line.rstrip()]
    assert verbose.isascii()
    page, tables = report.to_html(), report.to_markdown()
    hold_sound(page)
    for table in re.findall(r"(?m)(?:^\|.*\|$\n?)+", tables):
        assert len({len(CELL.split(line)) for line in table.splitlines()}) == 1, table
    shown = {f"{ms:,.1f}" for pair in timed_pairs(report) for ms in pair}
    assert not [(ms, each[:40]) for ms in shown for each in (plain, verbose, page, tables) if ms not in each]


def snippets(report: Report) -> Iterator[str]:
    findings: Any = (*report.findings, *report.prescription)
    yield from (each.treatment.code for each in findings if each.treatment)


NUMBER = re.compile(r"(?<![\w.,])\d[\d,]*(?:\.\d+)?")


def numbers_of_the_box_are_those_of_the_answer(found: Replay) -> None:
    """None is computed in a sentence, and the named parts add up to what FP8 takes longer."""
    said, lines = found.report.answer, [*found.box.lines]
    known = {str(number) for number in range(1, len(said.fixes) + 1)}
    known.update(*(_written(each) for each in _leaves(said)))
    printed = {
        number for each in lines if each.template != "why.parts" for number in NUMBER.findall(each.text)
    }
    assert printed <= known
    for each in (each for each in lines if each.template == "why.parts"):
        signs = re.findall(r"([+−])([\d,]+\.\d)", each.text)
        parts = [float(ms.replace(",", "")) * (-1 if sign == "−" else 1) for sign, ms in signs]
        assert sum(parts) == pytest.approx(sum(said.compared.parts_ms.values()), abs=0.05 * (len(parts) + 2))


def _leaves(of: Any) -> Iterator[Any]:
    """List what a record holds, down to its numbers and words."""
    if isinstance(of, Fit):
        yield of.sentence
    elif isinstance(of, Struct):
        yield from _leaves([if_recorded(getattr, of, name) for name in of.__struct_fields__])
    elif isinstance(of, dict | list | tuple):
        for each in of.values() if isinstance(of, dict) else of:
            yield from _leaves(each)
    else:
        yield of


def _written(leaf: Any) -> set[str]:
    """Write a number in every form that a sentence has for it."""
    if isinstance(leaf, str):
        return {*NUMBER.findall(leaf)}
    if not isinstance(leaf, int | float) or not leaf or not math.isfinite(leaf):
        return set()
    return {f"{each:,.{digits}f}" for each in (abs(leaf), 1 / abs(leaf)) for digits in (0, 1, 2)}


def a_screen_agrees_with_itself(found: Replay) -> None:
    report, view = found.report, found.view
    assert page(report, quiet=True).parts[0] == found.box
    ended = report.facts.ranks.processes if recorded(report.facts, "ranks") else ()
    errors = [each.error for each in ended if each.get("end") == "raised" and each.get("error")]
    assert all(each in (report.answer.fault.reason if report.answer.fault else "") for each in errors)
    questions = [each.text for each in found.box.lines if each.template == "open.question"]
    assert len(questions) == len(report.answer.open)
    assert sum(report.answer.command in each for each in questions if report.answer.command) <= 1
    assert (report.verdict.status != "open") or report.answer.open or report.answer.fault
    parts = found.page.parts
    shown = {each.code for part in parts if isinstance(part, Marks) for each in part.rows}
    told = " ".join(piece for part in parts if isinstance(part, Next) for piece in part.pieces)
    asked = {code for codes in EXPLAIN.findall(told) for code in codes.split()}
    causes = {each.code for each in report.answer.causes}
    grave = [each for each in report.findings if each.severity != "info" and each.treatment]
    assert asked <= shown | causes
    assert causes & {each.code for each in grave} <= shown | asked
    for step in report.prescription:
        if step.treatment.name == STAY_IN_BF16 and not step.code:  # else it heads what only FP8 has
            own = (each for each in grave if not each.caused_by and each.area != "memory")
            checks = [registry.check_of(each) for each in own]
            assert not any(each.changes_fp8 and not each.stays_in_bf16 for each in checks if each)
    known = {check.code for check in registry.discover()}
    assert {each.code for each in report.findings} <= known
    rows = [row for row in found.rows if row.speed.endswith("x")]
    ones = [row for row in rows if row.speed == "1x"]
    assert len(ones) <= 1
    assert not ones or ones[0].ms == view.bf16.ms.value
