"""A watched loss that is not finite leads the report, in every format."""

from __future__ import annotations

import math
from contextlib import suppress

import pytest
import torch

from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.facts import recorded
from fp8doctor.running.observer import ScriptObserver
from tests.running.conftest import Heard
from tests.running.loops import Net

STEPS = 12
"""The window and its profile end before."""


def train(observer: ScriptObserver, bad: int) -> None:
    """Train; the batch of step ``bad`` is not finite, and the script ends."""
    model = Net(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with suppress(SystemExit):  # --stop-on-nan
        for step in range(1, STEPS + 1):
            model(torch.full((8, 16), math.inf if step == bad else 1.0)).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    observer.closed()


AFTER_THE_WINDOW = (STEPS, True)
"""Only ``--stop-on-nan`` and ``--health`` watch to the script's end."""


@pytest.mark.parametrize(("bad", "stop_on_nan"), [(1, False), (4, False), (4, True), AFTER_THE_WINDOW])
def test_it_is_the_verdict_whenever_it_began(bad: int, observer: ScriptObserver, heard: Heard) -> None:
    train(observer, bad)
    assert heard.facts.not_finite.step == bad
    report = diagnose(heard.facts)
    assert (report.verdict.status, report.worst()) == ("not_finite", "error")


def test_a_run_whose_losses_are_finite_has_no_word_of_it(observer: ScriptObserver, heard: Heard) -> None:
    train(observer, STEPS + 1)
    assert not recorded(heard.facts, "not_finite")
    assert diagnose(heard.facts).verdict.status != "not_finite"
