"""DST004 on windows of several ranks, some of real steps, and on Transformer Engine's stand-in."""

from typing import Any

import pytest
import torch.distributed as dist
from msgspec.structs import replace

from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.facts import Breakdown, Distributed, Facts, Observation, Rank, Ranks, Training
from tests.checks.distributed.sharded import processes
from tests.checks.models import ran_in_te
from tests.checks.rules import Look, found_by, outcome_of

STRAGGLER, EXPOSED, AMAX = "straggler-rank", "exposed-communication", "amax-reduction"


def seen(number: int, *, step: float = 100.0, data: float = 0.0, before: float = 1.0, **more: Any) -> Rank:
    times = {"steps_ms": (step,) * 3, "data_ms": (data,) * 3, "before_forward_ms": (before + data,) * 3}
    return Rank(rank=number, end="ended", observed=Observation(**times | more))


def job(*ranks: Rank) -> Facts:
    return Facts(ranks=Ranks(world_size=len(ranks), processes=ranks))


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
    finding = found_by(STRAGGLER, facts)
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
    assert outcome_of(STRAGGLER, job(*ranks)) == "silent"


def test_a_rank_whose_exchange_waits_for_the_others_is_not_the_slow_one() -> None:
    """Two even ranks of FSDP2 on H200s: kernels are slow beside an exchange that waits."""
    parts = ({"gemm_fp8": 94.4, "communication": 9.5}, {"gemm_fp8": 110.7, "communication": 36.1})
    ranks = (
        seen(number, step=146.7, clock="cuda", breakdown=Breakdown(families_ms=each))
        for number, each in enumerate(parts)
    )
    assert outcome_of(STRAGGLER, job(*ranks)) == "silent"


def exposed(*ms: float, wrapper: Any = "DDP", world: int = 2, **more: Any) -> Facts:
    """Profiles with so much communication, of steps of 100 ms."""
    parts = ({"gemm_fp8": 60.0, "communication": each} for each in ms)
    ranks = [
        seen(number, **{"clock": "cuda", "breakdown": Breakdown(families_ms=each)} | more)
        for number, each in enumerate(parts)
    ]
    training = Training(distributed=Distributed(world_size=world, wrapper=wrapper))
    return replace(job(*ranks), observed=ranks[0].observed, training=training)


@pytest.mark.parametrize(
    ("wrapper", "line"),
    [("DDP", "model.no_sync()"), ("FSDP2", "set_modules_to_forward_prefetch"), (None, "2 * batch_size")],
)
def test_the_rank_that_waits_least_for_communication_tells(wrapper: str | None, line: str) -> None:
    """A larger batch is other work, which no ms of the step bound: it has no saving."""
    finding = found_by(EXPOSED, exposed(40.0, 15.0, wrapper=wrapper))
    assert (finding.evidence["exposed_ms"], finding.evidence["longest_ms"]) == (15.0, 40.0)
    assert line in finding.treatment.code
    assert (finding.saving_ms.high if finding.saving_ms else None) == (15.0 if wrapper else None)


def test_communication_that_is_hidden_or_none() -> None:
    """The others wait for it; tenths of a ms; one process; a CPU."""
    for facts in (exposed(40.0, 2.0), exposed(0.5, steps_ms=(2.0,) * 3)):
        assert outcome_of(EXPOSED, facts) == "silent"
    for facts in (exposed(40.0, world=1), exposed(40.0, clock="host")):
        assert outcome_of(EXPOSED, facts) == "not_applicable"


@pytest.mark.parametrize(
    ("world", "of_group", "severity"), [(16, None, "warning"), (8, None, "info"), (16, 2, "info")]
)
def test_delayed_scaling_reduces_its_amax(
    world: int, of_group: int | None, severity: str, look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trained(recipe: str = "DelayedScaling", *, reduce: bool = True) -> Facts:
        model = ran_in_te(monkeypatch, recipe, reduce_amax=reduce)
        model[0].fp8_meta["fp8_group"] = dist.new_group(list(range(of_group))) if of_group else None
        return look(model)

    with processes(world):
        finding = found_by(AMAX, trained())
        assert finding.evidence == {"amax_ranks": of_group or world, "world_size": world}
        assert finding.severity == severity
        assert outcome_of(AMAX, trained(reduce=False)) == "silent"
        assert outcome_of(AMAX, trained("Float8CurrentScaling")) == "not_applicable"
    of_group = None
    assert outcome_of(AMAX, trained()) == "not_applicable"
