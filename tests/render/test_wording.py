"""Sentences of recorded screens that a stranger could not read, each as a rule for all screens."""

from __future__ import annotations

import re
from pathlib import Path

from fp8doctor.diagnosis.answer import GRAVE
from fp8doctor.facts import recorded
from fp8doctor.render.causes import state_now
from tests.diagnosis.test_plan_agrees import EVERY, replayed


@EVERY
def test_a_list_of_untimed_variants_has_no_pronoun(path: Path) -> None:
    """One reason stands behind several variants."""
    _, screen, _ = replayed(path)
    assert not re.search(r"(before|enough for|small for) it\)|it takes\)|\(it ", screen.untimed)


@EVERY
def test_a_number_in_brackets_says_what_it_is(path: Path) -> None:
    _, screen, _ = replayed(path)
    for each in screen.answer.why:
        assert not re.search(r"\([\d,.]+\)", each)


@EVERY
def test_an_open_question_is_a_question(path: Path) -> None:
    _, screen, _ = replayed(path)
    assert not any("Open: whether" in each for each in screen.answer.fix)


@EVERY
def test_the_first_fix_is_of_the_title_if_that_is_a_fault(path: Path) -> None:
    report, screen, _ = replayed(path)
    state = state_now(report)
    if state and screen.answer.what == state.title and report.verdict.status not in GRAVE:
        number = next((n for n, step in enumerate(report.prescription) if state.code in step.mends), 0)
        stays = report.prescription and report.prescription[0].treatment.name == "stay-in-bf16"
        assert stays or number == 0


@EVERY
def test_a_model_with_compiled_layers_is_not_called_uncompiled(path: Path) -> None:
    report, screen, _ = replayed(path)
    linears = report.facts.linears() if recorded(report.facts, "network") else ()
    if any(each.get("compiled") is not None for each in linears):
        assert not dict(screen.facts)["Compiled"].startswith("0 of")
