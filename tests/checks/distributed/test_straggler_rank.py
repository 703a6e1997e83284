"""DST004 on windows of several ranks, some of real steps, and on Transformer Engine's stand-in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch import nn

from fp8doctor.checks.distributed.straggler_rank import exposed_communication, straggler_rank
from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.facts import Breakdown, Distributed, Facts, Observation, Rank, Ranks, Training
from fp8doctor.finding import Finding, NotApplicable
from fp8doctor.running.losses import Losses
from fp8doctor.running.rank_reports import rank_of
from fp8doctor.running.script_messages import ScriptState
from fp8doctor.running.step_window import StepWindow
from tests.checks.distributed.sharded import processes
from tests.checks.environment.live import finding_of, outcome_of
from tests.stand_ins import transformer_engine as stand_in

AMAX = "amax-reduction"


def seen(number: int, *, step: float = 100.0, data: float = 0.0, before: float = 1.0, **more: Any) -> Rank:
    times = {"steps_ms": (step,) * 3, "data_ms": (data,) * 3, "before_forward_ms": (before + data,) * 3}
    return Rank(rank=number, end="ended", observed=Observation(**times | more), gpu=None)


def job(*ranks: Rank) -> Facts:
    return Facts(ranks=Ranks(world_size=len(ranks), of_host=len(ranks), processes=ranks))


@pytest.mark.parametrize(
    ("slow", "part"),
    [
        ({"before": 41.0}, "before its forward"),
        ({"data": 41.0}, "waiting for data"),
        ({"step": 150.0}, "for a step"),
    ],
)
def test_the_slow_one_is_named_with_its_part(slow: dict[str, float], part: str) -> None:
    facts = job(seen(0), seen(1, before=31.0), seen(2, **slow), seen(3), seen(4))
    finding = straggler_rank(facts)
    assert (finding.evidence["rank"], finding.evidence["part"]) == (2, part)
    assert finding.saving_ms.high == pytest.approx(
        finding.evidence["own_ms"] - finding.evidence["others_ms"]  # type: ignore[operator]
    )
    assert diagnose(facts).answer.causes[0].title.startswith("Rank ")


@pytest.mark.parametrize(
    "ranks",
    [
        (seen(0), seen(1, before=9.0), seen(2, data=8.0)),
        (seen(0), seen(1, steps_ms=(80.0, 130.0, 90.0, 125.0, 120.0))),
        (seen(0, step=1.0, before=0.1), seen(1, step=1.0, before=0.7)),
        (seen(0), seen(1, data_ms=None, before_forward_ms=None)),
    ],
    ids=["even", "steps that scatter", "tenths of a ms", "calls not seen"],
)
def test_nobody_is_accused(ranks: tuple[Rank, ...]) -> None:
    assert straggler_rank(job(*ranks)) is None


@pytest.mark.parametrize(("own_ms", "names"), [(32.0, False), (60.0, True)])
def test_computing_is_compared_as_it_was_profiled(own_ms: float, names: bool) -> None:
    """The profiled step of rank 0 waited for 33 ms more than its other steps, and is held to their length."""
    waited = Breakdown(families_ms={"cast": 24.0, "communication": 26.0}, scale=4 / 3)
    own = Breakdown(families_ms={"cast": own_ms}, scale=1.0)
    ranks = (seen(0, clock="cuda", breakdown=waited), seen(1, clock="cuda", breakdown=own))
    finding = straggler_rank(job(*ranks))
    assert isinstance(finding, Finding) is names
    if isinstance(finding, Finding):
        assert (finding.evidence["rank"], finding.evidence["others_ms"]) == (1, pytest.approx(32.0))


def real_window(late: bool) -> Facts:
    """Facts of a rank from three real steps; a late one calls its model at the end of the step."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    window = StepWindow(3, 5, (model,), losses=Losses())
    window.begin()
    for _ in range(3):
        for _ in range(4000 * late):
            torch.ones(64).sum()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        window.stepped()
    window.end()
    observed = window.observation(("SGD",), 1.0)
    assert observed
    return Facts(observed=observed, training=Training(distributed=Distributed(device=None)), gpus=())


def test_real_steps() -> None:
    """The late rank works more than a hundred times as long before its forward as in it."""
    states = (ScriptState(real_window(late), complete=True, ended=True) for late in (False, True))
    finding = straggler_rank(job(*(rank_of(number, state) for number, state in enumerate(states))))
    assert (finding.evidence["rank"], finding.evidence["part"]) == (1, "before its forward")


def exposed(*ms: float, wrapper: Any = "DDP", world: int = 2, **more: Any) -> Any:
    """What the check says of profiles with so much communication, of steps of 100 ms."""
    parts = ({"gemm_fp8": 60.0, "communication": each} for each in ms)
    ranks = [
        seen(number, **{"clock": "cuda", "breakdown": Breakdown(families_ms=each)} | more)
        for number, each in enumerate(parts)
    ]
    training = Training(distributed=Distributed(world_size=world, wrapper=wrapper))
    return exposed_communication(replace(job(*ranks), observed=ranks[0].observed, training=training))


@pytest.mark.parametrize(
    ("wrapper", "line"),
    [("DDP", "model.no_sync()"), ("FSDP2", "set_modules_to_forward_prefetch"), (None, "2 * batch_size")],
)
def test_the_rank_that_waits_least_for_communication_tells(wrapper: str | None, line: str) -> None:
    """A larger batch is other work, which no ms of the step bound: it has no saving."""
    finding = exposed(40.0, 15.0, wrapper=wrapper)
    assert (finding.evidence["exposed_ms"], finding.evidence["longest_ms"]) == (15.0, 40.0)
    assert line in finding.treatment.code
    assert (finding.saving_ms.high if finding.saving_ms else None) == (15.0 if wrapper else None)


def test_communication_that_is_hidden_or_none() -> None:
    assert exposed(40.0, 2.0) is None, "the others wait for it"
    assert exposed(0.5, steps_ms=(2.0,) * 3) is None, "tenths of a ms"
    assert isinstance(exposed(40.0, world=1), NotApplicable)
    assert isinstance(exposed(40.0, clock="host"), NotApplicable)


@pytest.mark.parametrize(
    ("world", "of_group", "severity"), [(16, None, "warning"), (8, None, "info"), (16, 2, "info")]
)
def test_delayed_scaling_reduces_its_amax(
    world: int,
    of_group: int | None,
    severity: str,
    look: Callable[..., Facts],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    te = stand_in.install(monkeypatch, "quantization")

    def trained(recipe: str = "DelayedScaling", *, reduce: bool = True) -> Facts:
        layer, chosen = te.Linear(64, 64), getattr(stand_in, recipe)()
        chosen.reduce_amax = reduce
        with stand_in.autocast(enabled=True, recipe=chosen):
            layer(torch.ones(16, 64))
        layer.fp8_meta["fp8_group"] = dist.new_group(list(range(of_group))) if of_group else None
        return look(nn.Sequential(layer))

    with processes(world):
        finding = finding_of(AMAX, trained())
        assert finding.evidence == {"amax_ranks": of_group or world, "world_size": world}
        assert finding.severity == severity
        assert outcome_of(AMAX, trained(reduce=False)).outcome == "silent"
        assert outcome_of(AMAX, trained("Float8CurrentScaling")).outcome == "not_applicable"
    of_group = None
    assert outcome_of(AMAX, trained()).outcome == "not_applicable"
