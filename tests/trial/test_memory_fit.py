"""What is known not to fit: numbers of a GPU's memory stand in for one, and the arms are not built."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import pytest
import torch
from torch import nn

from fp8doctor.facts import Target, Workload
from fp8doctor.facts.arm_names import Reason
from fp8doctor.facts.no_number import NoNumber
from fp8doctor.facts.unrecorded import NOT_RECORDED
from fp8doctor.loading.job import Job
from fp8doctor.trial import conductor
from fp8doctor.trial.copies.depth import Cut, Plan, Stack
from fp8doctor.trial.measure import layout
from fp8doctor.trial.measure.attempt import Attempt, Ready
from fp8doctor.trial.measure.bench import Bench
from fp8doctor.trial.measure.budget import Budget
from fp8doctor.trial.measure.evidence import Compilations
from fp8doctor.trial.measure.memory_fit import (
    beyond_gpu,
    not_fitting,
    step_gib,
)
from fp8doctor.trial.measure.peak_memory import Held
from fp8doctor.trial.measure.trial_run import TrialRun
from fp8doctor.trial.variant import VariantPlan, as_it_is

CPU = torch.device("cpu")


def measured(peak_gib: float | None, weights_gib: float = 10.0, gradients_gib: float = 10.0) -> Ready:
    """An arm at one cut, with an optimizer of twice its weights."""
    compiled = Compilations(graphs=NOT_RECORDED)
    held = Held(weights_gib, 0.0, 2 * weights_gib, gradients_gib)
    return Ready(lambda: torch.zeros(()), None, compiled, held, peak_gib, None, 0.0, 0.0, None)


def planned(name: str, *treatments: str, base: str | None = "as_is", times: float = 1.0) -> VariantPlan:
    return VariantPlan(name, as_it_is, treatments, base=base, tokens_ratio=times)


AS_IS = Attempt(planned("as_is", base=None), [measured(50.0), measured(90.0)])
LARGER = planned("larger-batch", "larger-batch", times=2.0)


def test_the_least_of_more_tokens_grows_by_activations_alone() -> None:
    assert step_gib([measured(50.0), measured(90.0)], 1.0) == 60.0  # beside 30 that lie there between two
    assert step_gib([measured(50.0), measured(90.0)], 2.0) == 60.0 + (60.0 - 10.0 - 10.0)
    assert step_gib([measured(42.0)], 2.0) == 12.0, "gradients, and what may be copies of the weights"
    assert step_gib([measured(50.0), measured(None)], 2.0) is None
    assert step_gib([], 2.0) is None


@pytest.mark.parametrize(
    ("room", "frees", "why"),
    [
        (None, 0.0, None),
        (100.0, 0.0, None),
        (91.0, 0.0, None),  # within the margin
        (90.0, 0.0, Reason.DOES_NOT_FIT),
        (60.0, 31.0, Reason.OUT_OF_MEMORY),  # alone it may
        (60.0, 30.0, Reason.DOES_NOT_FIT),
    ],
)
def test_a_larger_batch_is_held_to_what_is_free(room: float | None, frees: float, why: Reason | None) -> None:
    found = not_fitting(LARGER, [AS_IS], room, frees)
    assert (found.why if found else None) is why
    if why is Reason.DOES_NOT_FIT:
        assert found == NoNumber(
            why,
            "it was not tried: modelled from the step as you run it, its step takes at least 100 GiB, "
            "and the GPU has 90 GiB free",
        )


PLAN = Plan((Stack("blocks", 10, 0, 1),), (Cut({"blocks": 2}), Cut({"blocks": 4})))
"""Two blocks more take twenty GiB more below: the whole model 40 + 4 * 20 = 120."""


def built(name: str, *treatments: str, more_gib: float = 0.0) -> Attempt:
    """Make an arm that was built at both cuts and takes so much more than `AT_CUTS` at each."""
    ready = [measured(each + more_gib, weights_gib=4.0, gradients_gib=4.0) for each in (40.0, 60.0)]
    return Attempt(planned(name, *treatments, base=None if name == "as_is" else "as_is"), ready)


AT_CUTS = built("as_is")


@pytest.mark.parametrize(
    ("arm", "gib", "fits"),
    [
        (built("a", "checkpointing-off", more_gib=5.0), None, True),  # a CPU
        (built("a", "checkpointing-off", more_gib=5.0), 139.0, True),
        (built("a", "checkpointing-off", more_gib=5.0), 138.0, False),  # it may fill nine tenths
        (built("a", "cache-off", more_gib=0.5), 126.0, True),  # hardly more than the step as it is
        (built("a", "cache-off", more_gib=0.5), 100.0, True),  # which does not fit either
        (built("a", "cache-off", more_gib=5.0), 100.0, False),
        (built("bf16", more_gib=5.0), 125.0, True),
        (built("bf16", more_gib=5.0), 124.0, False),
        (built("bf16", more_gib=5.0), 119.0, True),  # both are of a job that runs elsewhere
        (built("without_adapters", more_gib=50.0), 121.0, True),  # prescribed by nobody
        (built("bf16_without_checkpointing", more_gib=5.0), 139.0, True),
        (built("bf16_without_checkpointing", more_gib=5.0), 138.0, False),  # FP8 would be compared with it
        (built("bf16_without_checkpointing", more_gib=0.5), 100.0, True),
        (AT_CUTS, 119.0, True),
    ],
)
def test_what_is_predicted_to_exceed_the_gpu_at_full_depth_has_no_number(
    arm: Attempt, gib: float | None, fits: bool
) -> None:
    found = beyond_gpu(arm, [AT_CUTS, arm], PLAN, gib)
    assert (found is None) is fits
    assert beyond_gpu(arm, [AT_CUTS, arm], Plan((), (Cut({}),)), gib) is None, "what was run whole fits"
    if found:
        assert found.why is Reason.DOES_NOT_FIT


class StandInBench:
    """A bench on a GPU with so much memory, of which it notes what is built."""

    device = CPU
    plan = Plan((), (Cut({}),))
    as_one = False

    def __init__(self, frees_gib: float) -> None:
        self.built: list[str] = []
        self.let_go_of = 0
        self._frees_gib = frees_gib

    def frees_gib(self) -> float:
        return self._frees_gib

    def build(self, attempt: Attempt, until: float) -> None:
        self.built.append(attempt.plan.name)
        attempt.ready = [measured(50.0), measured(90.0)]

    def drop(self, attempt: Attempt, no_number: NoNumber) -> None:
        attempt.no_number, self.let_go_of = no_number, self.let_go_of + 1
        attempt.ready.clear()


@pytest.mark.parametrize(("room", "built"), [(60.0, ["as_is"]), (120.0, ["as_is", "larger-batch"])])
def test_what_does_not_fit_is_not_built(
    room: float, built: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = TrialRun(CPU, Budget(1e6))
    monkeypatch.setattr(conductor, "room_gib", lambda device: room)
    stand_in = StandInBench(frees_gib=0.0)
    attempts = [Attempt(AS_IS.plan), Attempt(LARGER)]
    conductor._build(cast(Bench, stand_in), attempts, run)
    assert stand_in.built == built
    assert (attempts[1].why is Reason.DOES_NOT_FIT) is (len(built) == 1)


def ten_blocks() -> nn.Module:
    """1 KiB in each block, and 1 KiB beside them that is not trained."""
    blocks = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(10))
    model = nn.ModuleDict({"blocks": blocks, "head": nn.Linear(16, 16, bias=False)})
    model["head"].requires_grad_(False)
    return model


@pytest.mark.parametrize(
    ("room", "laid_out"), [(lambda: None, True), (lambda: 11 / 2**20, True), (lambda: 10 / 2**20, False)]
)
def test_cuts_that_cannot_fit_are_not_laid_out(
    room: Callable[[], float | None], laid_out: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = Bench.__new__(Bench)
    of.job, of.device = Job(model=ten_blocks(), target=Target(), workload=Workload()), CPU
    of._plans, of._deeper = [PLAN, Plan((), (Cut({}),))], []
    made: list[Cut] = []
    monkeypatch.setattr(layout, "room_gib", lambda device: room())
    monkeypatch.setattr(of, "_add", made.append)
    assert of._laid_out(PLAN) is laid_out
    assert made == (list(PLAN.cuts) if laid_out else [])
