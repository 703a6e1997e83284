"""What a trial begins and what it keeps time for when its time is short."""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fp8doctor.facts import recorded
from fp8doctor.facts.arm_names import Reason
from fp8doctor.trial.conductor import conduct
from fp8doctor.trial.measure import rounds, timer
from fp8doctor.trial.measure.budget import CLOSING_S, HARD_LIMIT, ROUNDS_SHARE, Budget
from fp8doctor.trial.measure.trial_run import TrialRun
from fp8doctor.trial.variant import as_it_is
from tests.trial.decoder import AS_IS, BF16, CPU, job, run, trial
from tests.trial.planted import CLOCK, TICKING_BF16, explored, ticking

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("few_rounds")]


@pytest.mark.parametrize(
    ("name", "tried"), [("bf16", True), ("bf16_prescribed", True), ("keep-in-bf16", False)]
)
def test_only_what_decides_is_begun_after_a_compilation_that_took_the_whole_budget(
    name: str, tried: bool
) -> None:
    of = TrialRun(CPU, Budget(600.0, time.monotonic() - 1.1 * 600))
    arms = conduct(job(blocks=3), ["blocks"], [AS_IS, replace(BF16, name=name, base="as_is")], of).arms
    assert [(arm.name, arm.tried) for arm in arms] == [("as_is", True), (name, tried)]


def test_the_window_ends_in_time_for_what_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = []

    def noted(steps: Any, device: Any, limits: timer.Limits, *given: Any, **asked: Any) -> Any:
        began = time.monotonic()  # a busy host may take long for the rounds
        result = timer.interleave(steps, device, limits, *given, **asked)
        assert limits.overtime_s == (HARD_LIMIT - 1) * 600
        ends.append(tuple(each - began for each in (limits.until, limits.latest, limits.soon)))
        return result

    monkeypatch.setattr(rounds, "interleave", noted)
    began = time.monotonic()
    run(job(blocks=3), AS_IS, explored("unasked", as_it_is, AS_IS))
    ((until, latest, soon),) = ends
    assert ROUNDS_SHARE * 600 - 10 <= soon <= ROUNDS_SHARE * 600
    took_s = time.monotonic() - began
    assert 600 - CLOSING_S - 10 - took_s <= until < 600 - CLOSING_S
    assert HARD_LIMIT * 600 - CLOSING_S - 10 - took_s <= latest <= HARD_LIMIT * 600


def test_fewer_rounds_than_the_interval_needs_are_not_called_reliable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(timer, "time", SimpleNamespace(perf_counter=CLOCK, monotonic=time.monotonic))
    monkeypatch.setattr(Budget, "rounds_latest", lambda self, costs: 0.0)
    result = trial(ticking(), AS_IS, TICKING_BF16)
    assert [len(arm.rounds_ms) for arm in result.arms] == [1, 1]
    assert result.reliable is False
    assert (
        result.reason == "there was time for only 1 of the 5 rounds that an interval of 90% confidence needs"
    )


def test_the_time_of_numerics_that_say_something_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights of one job have structure; those of the other are as an initializer draws them."""
    seen: list[bool] = []
    rest = Budget.after_rounds_s
    monkeypatch.setattr(
        Budget, "after_rounds_s", lambda self, costs: (seen.append(self.numerics), rest(self, costs))[1]
    )
    trained, fresh = job(blocks=3), job(blocks=3)
    for parameter in trained.model.parameters():
        if parameter.dim() == 2:
            parameter.data *= torch.logspace(-1, 1, parameter.shape[0]).unsqueeze(1)
    measured, not_measured = (trial(of, AS_IS) for of in (trained, fresh))
    assert (seen[0], seen[-1]) == (True, False)
    assert recorded(measured, "numerics")
    assert "as an initializer draws them" in not_measured.gaps["trial.numerics"]


def test_what_the_budget_does_not_reach_is_said() -> None:
    arms = run(job(blocks=3), AS_IS, BF16, budget_s=0.0)
    assert arms["as_is"].tried
    assert arms["bf16"].why is Reason.NO_TIME_LEFT
    assert arms["bf16"].reason == "it did not fit into the budget of 0 s"
