"""A build that takes too long is given up, and nothing of the alarm stays."""

from __future__ import annotations

import math
import signal
import threading
import time
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from fp8doctor.facts.arm_names import Reason
from fp8doctor.trial.conductor import conduct
from fp8doctor.trial.measure import bench, budget
from fp8doctor.trial.measure.budget import Budget, Overrun, given_up
from fp8doctor.trial.measure.trial_run import TrialRun
from fp8doctor.trial.variant import Variant, VariantPlan, as_it_is
from tests.trial.decoder import CPU, Decoder, job


def spin() -> None:
    while True:
        time.sleep(1e-3)


def test_it_is_given_up_when_the_time_is_over() -> None:
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(Overrun), given_up(time.monotonic(), interrupts=True):
        spin()
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_what_swallows_it_meets_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "AGAIN_S", 1e-2)

    def swallow_one() -> None:
        with suppress(BaseException):
            spin()
        spin()

    with pytest.raises(Overrun), given_up(time.monotonic(), interrupts=True):
        swallow_one()


def test_a_users_process_has_no_alarm_of_ours() -> None:
    with given_up(time.monotonic(), interrupts=False):
        assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_only_the_main_thread_is_interrupted() -> None:
    seen: list[Any] = []

    def other() -> None:
        with given_up(time.monotonic(), interrupts=True):
            seen.append(signal.getitimer(signal.ITIMER_REAL))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join(timeout=600)
    assert seen == [(0.0, 0.0)]


@pytest.mark.slow
def test_an_arm_that_never_ends_costs_itself_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def soon(self: Budget, costs: dict[str, object]) -> float:
        return time.monotonic() + 0.05 if costs else math.inf

    def never(variant: Variant) -> Variant:
        spin()
        return variant

    monkeypatch.setattr(Budget, "build_until", soon)
    now_s = time.monotonic()
    monkeypatch.setattr(bench, "time", SimpleNamespace(monotonic=lambda: now_s))  # a build takes 0 s
    plans = (VariantPlan("as_is", as_it_is), VariantPlan("never", never, ("x",), base="as_is"))
    found = conduct(
        job(model=Decoder(1).bfloat16()), [], plans, TrialRun(CPU, Budget(600.0), own_process=True)
    )
    as_is, left = found.arms
    assert as_is.tried
    assert (left.tried, left.why) == (False, Reason.NO_TIME_LEFT)
    assert left.reason == "it was given up after 0 s, because no time was left to build it"
    assert found.enough_s, "with which it may be tried again"
    assert found.harm == ()


@pytest.mark.slow
def test_no_further_cut_is_begun_that_would_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Variant] = []

    def noted(variant: Variant) -> Variant:
        made.append(variant)
        return variant

    monkeypatch.setattr(bench.Bench, "_further_s", lambda *_, **settings: math.inf)
    found = conduct(
        job(model=Decoder(26).bfloat16()),
        ["blocks"],
        [VariantPlan("as_is", noted)],
        TrialRun(CPU, Budget(600.0)),
    )
    assert len(made) == 1
    assert (found.arms[0].tried, found.arms[0].why) == (False, Reason.NO_TIME_LEFT)
