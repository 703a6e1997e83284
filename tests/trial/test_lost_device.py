"""What the process dies of is named before it begins, and what was known is kept."""

import pytest
import torch

from fp8doctor import inspect_model
from fp8doctor.facts import Arm, Trial
from fp8doctor.facts.no_number import BREAKDOWN
from fp8doctor.trial import conductor
from fp8doctor.trial.measure import bench
from fp8doctor.trial.measure.budget import DeviceLost, TrialRun
from fp8doctor.trial.state.guard import Guard
from fp8doctor.trial.state.settings import CONTEXT
from tests.trial.decoder import AS_IS, job, trial
from tests.trial.planted import worn

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("few_rounds")]


def lost_at(monkeypatch: pytest.MonkeyPatch, *parts: str) -> None:
    """A stand-in for a CUDA context that is gone: the question whether it is there, which a CPU always
    answers with yes."""

    def gone(device: torch.device, part: str) -> None:
        if part in parts:
            raise DeviceLost(part, "it took the GPU's context down: RuntimeError: planted")

    for module in (conductor, bench):
        monkeypatch.setattr(module, "still_there", gone)


@pytest.mark.parametrize("part", ["worn", "the trial"])
def test_what_loses_the_device_is_named_and_nothing_on_it_is_read(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost_at(monkeypatch, part)
    monkeypatch.setattr(Guard, "changed", lambda guard, before: pytest.fail("it reads tensors"))
    with pytest.raises(DeviceLost) as lost:
        trial(job(blocks=3), AS_IS, worn())
    assert lost.value.arm == part


KNOWN = Trial(device="cpu", arms=(Arm(name="as_is", tried=True, step_ms=1.0),), reliable=True, reason=None)


@pytest.mark.parametrize("known", [KNOWN, None], ids=["times are known", "nothing is known"])
def test_a_live_model_whose_device_is_lost_has_a_report_that_says_so(
    known: Trial | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loses(job: object, lists: object, plans: object, run: TrialRun) -> Trial:
        if known:
            run.keep(known)
        raise DeviceLost(BREAKDOWN, "it took the GPU's context down: planted")

    monkeypatch.setattr(conductor, "timed", loses)
    of = job(blocks=1)
    found = inspect_model(
        of.model, of.batch, loss=of.loss, device="cpu", budget_s=1, select="NUM"
    ).facts.trial
    assert (found.harm, found.reliable) == ((CONTEXT,), False)
    assert CONTEXT in (found.reason or "")
    assert found.arms == (known.arms if known else ())
    assert known or "it took the GPU's context down: planted" in (found.reason or "")
