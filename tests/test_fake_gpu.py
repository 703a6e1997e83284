"""What makes the product's numbers, on a GPU whose clock the test sets: no time is read before the GPU is
done, none of settling steps counts, and a variant's time is its median."""

import pytest
import torch

from fp8doctor.analysis.arms import lacked_time
from fp8doctor.trial.copies.depth import WHOLE, Plan, Stack
from fp8doctor.trial.copies.step import VariantPlan, as_it_is
from fp8doctor.trial.measure.attempt import Attempt, Ready
from fp8doctor.trial.measure.evidence import Compilations, StepProof
from fp8doctor.trial.measure.memory import StepMemory
from fp8doctor.trial.measure.results import _arm
from fp8doctor.trial.measure.timer import Block, block_ms
from tests.fake_gpu import FakeGpu


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    return FakeGpu(monkeypatch)


def test_a_block_is_the_median_of_its_settled_steps(gpu: FakeGpu) -> None:
    looked = []
    times = iter([90.0, 80.0, 10.0, 12.0, 50.0])
    block = Block(dropped=2, kept=3)
    assert (
        block_ms(lambda: gpu.run(next(times)), gpu.device, block, lambda: looked.append(gpu.waited)) == 12.0
    )
    assert gpu.waited == gpu.launched == 242.0
    assert looked == [0.0], "the GPU still works while the doctor looks at it"


READY = Ready(
    step=lambda: torch.zeros(()),
    model=None,
    compiled=Compilations(),
    memory=StepMemory(1.0, 2.0, 1.0),
    step_s=0.0,
    launched_s=None,
    non_finite=None,
)


def attempted(depths: int) -> Attempt:
    return Attempt(VariantPlan("as_is", as_it_is), [READY] * depths, proof=StepProof(0, 0))


def test_rounds_that_no_line_fits_are_no_time() -> None:
    """On a shared GPU a deeper cut may take less than a shallow one, and full depth less than nothing."""
    plan = Plan((Stack("blocks", 24, 0, 1),), ({"blocks": 2}, {"blocks": 6}))
    arm = _arm(plan, attempted(2), {("as_is", 0): [60.0, 40.0], ("as_is", 1): [30.0, 80.0]})
    assert not arm.tried
    assert lacked_time(arm)


def test_a_variants_time_is_the_median_of_its_rounds() -> None:
    rounds = [10.0, 11.0, 15.0, 30.0, 70.0]
    arm = _arm(WHOLE, attempted(1), {("as_is", 0): rounds})
    assert (arm.low_ms, arm.step_ms, arm.high_ms) == (10.0, 15.0, 70.0)
    assert arm.cuts[0].step_ms == 15.0
    assert arm.rounds_ms == (*rounds,)
