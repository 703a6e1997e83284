"""DST004 on windows of several ranks, some of real steps."""

from __future__ import annotations

import msgspec
import pytest
import torch
from torch import nn

from fp8doctor.analysis.rank_comparison import behind
from fp8doctor.checks.distributed.straggler_rank import straggler_rank
from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.facts import Breakdown, Distributed, Facts, Gpu, Observation, Rank, Ranks, Training
from fp8doctor.finding import Finding, NotApplicable
from fp8doctor.running.losses import LossLog
from fp8doctor.running.rank_reports import rank_of
from fp8doctor.running.script_messages import ScriptState
from fp8doctor.running.step_window import StepWindow

STEP = (100.0, 100.0, 100.0)


def rank(number: int, *, step: float = 100.0, data: float | None = 0.0, before: float = 1.0) -> Rank:
    observed = Observation(
        steps_ms=(step,) * 3,
        data_ms=None if data is None else (data,) * 3,
        before_forward_ms=(before + (data or 0.0),) * 3,
    )
    return Rank(rank=number, end="ended", observed=observed, gpu=None)


def job(*processes: Rank) -> Facts:
    return Facts(ranks=Ranks(world_size=len(processes), of_host=len(processes), processes=processes))


def found(*processes: Rank) -> Finding | NotApplicable | None:
    return straggler_rank(job(*processes))


def test_even_ranks_are_healthy() -> None:
    assert found(rank(0), rank(1, before=9.0), rank(2, data=8.0)) is None


@pytest.mark.parametrize(
    ("slow", "part"),
    [
        (rank(2, before=41.0), "before its forward"),
        (rank(2, data=41.0), "waiting for data"),
        (rank(2, step=150.0), "for a step"),
    ],
)
def test_the_slow_one_is_named_with_its_part(slow: Rank, part: str) -> None:
    finding = found(rank(0), rank(1), slow, rank(3))
    assert isinstance(finding, Finding)
    assert (finding.evidence["rank"], finding.evidence["part"]) == (2, part)
    assert finding.title.startswith(f"Rank 2 takes {finding.evidence['own_ms']:.1f} ms {part}, the others ")
    assert finding.saving_ms is not None
    assert finding.saving_ms.high == finding.evidence["own_ms"] - finding.evidence["others_ms"]  # type: ignore[operator]


@pytest.mark.parametrize(("own_ms", "names"), [(32.0, False), (60.0, True)])
def test_computing_is_compared_as_it_was_profiled(own_ms: float, names: bool) -> None:
    """The profiled step of rank 0 waited for 33 ms more than its other steps, and is held to their length."""
    waited = Breakdown(families_ms={"cast": 24.0, "communication": 26.0}, scale=4 / 3)
    own = Breakdown(families_ms={"cast": own_ms}, scale=1.0)
    ranks = [
        msgspec.structs.replace(
            each, observed=msgspec.structs.replace(each.observed, clock="cuda", breakdown=breakdown)
        )
        for each, breakdown in ((rank(0), waited), (rank(1), own))
    ]
    finding = found(*ranks)
    assert isinstance(finding, Finding) is names
    if isinstance(finding, Finding):
        assert (finding.evidence["rank"], finding.evidence["others_ms"]) == (1, pytest.approx(32.0))


def test_what_makes_its_steps_longer_is_told_once() -> None:
    facts = job(rank(0), rank(1, step=150.0, before=51.0))
    assert [(each.rank, each.what) for each in behind(facts)] == [(1, "before its forward")]


def test_the_answer_names_it_before_anything_about_fp8() -> None:
    behind_rank, alike = (diagnose(job(rank(0), other)) for other in (rank(1, before=31.0), rank(1)))
    assert behind_rank.answer.causes[0].title.startswith("Rank 1 keeps the others waiting")
    assert not [each for each in alike.answer.causes if each.title.startswith("Rank")]


def test_steps_that_scatter_accuse_nobody() -> None:
    scattered = Observation(
        steps_ms=(80.0, 130.0, 90.0, 125.0, 120.0), data_ms=None, before_forward_ms=(1.0,) * 5
    )
    assert found(rank(0), Rank(rank=1, observed=scattered)) is None


def test_waits_that_scatter_accuse_nobody() -> None:
    late = Observation(steps_ms=STEP, data_ms=None, before_forward_ms=(1.0, 30.0, 40.0))
    assert found(rank(0), Rank(rank=1, observed=late)) is None


def test_tenths_of_a_ms_accuse_nobody() -> None:
    assert found(rank(0, step=1.0, before=0.1), rank(1, step=1.0, before=0.7)) is None


def test_the_worst_comes_first_and_the_next_are_told() -> None:
    finding = found(rank(0), rank(1, before=31.0), rank(2, data=60.0), rank(3), rank(4))
    assert isinstance(finding, Finding)
    assert finding.evidence["rank"] == 2
    assert "Rank 1 takes 31.0 ms before its forward, the others 1.0 ms." in finding.explanation


def test_a_rank_without_a_window_is_not_compared() -> None:
    answer = found(rank(0), Rank(rank=1, end="not_seen"))
    assert isinstance(answer, NotApplicable)


def test_a_rank_whose_call_was_not_seen_is_compared_by_the_rest() -> None:
    unseen = Rank(rank=1, observed=Observation(steps_ms=STEP, data_ms=None, before_forward_ms=None))
    assert found(rank(0), unseen) is None
    assert isinstance(found(rank(0), unseen, rank(2, before=50.0)), Finding)


def test_one_process() -> None:
    facts = Facts(training=Training(distributed=None))
    assert isinstance(straggler_rank(facts), NotApplicable)


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (Gpu(name="H200", power_limit_w=500.0, sm_clock_max_mhz=1980), "rank 1 power limit 500.0 W"),
        (Gpu(name="H100", power_limit_w=700.0, sm_clock_max_mhz=1980), "rank 1 H100"),
    ],
)
def test_unlike_gpus(other: Gpu, told: str) -> None:
    one = Gpu(name="H200", power_limit_w=700.0, sm_clock_max_mhz=1980)
    processes = [
        Rank(rank=number, observed=rank(number).observed, gpu=gpu) for number, gpu in enumerate((one, other))
    ]
    finding = straggler_rank(job(*processes))
    assert isinstance(finding, Finding)
    assert told in finding.explanation
    assert straggler_rank(job(*(Rank(rank=n, observed=rank(n).observed, gpu=one) for n in (0, 1)))) is None


def real_window(late: bool) -> Facts:
    """Facts of a rank from three real steps; a late one calls its model at the end of the step."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    window = StepWindow(3, 5, (model,), capture=False, losses=LossLog())
    window.begin()
    for _ in range(3):
        if late:
            for _ in range(4000):
                torch.ones(64).sum()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        window.stepped()
    window.end()
    observed = window.observation(("SGD",), 1.0)
    assert observed is not None
    return Facts(observed=observed, training=Training(distributed=Distributed(device=None)), gpus=())


def test_real_steps() -> None:
    """The late rank works more than a hundred times as long before its forward as in it."""
    ranks = tuple(
        rank_of(number, ScriptState(real_window(late), complete=True, ended=True))
        for number, late in enumerate((False, True))
    )
    finding = straggler_rank(Facts(ranks=Ranks(world_size=2, of_host=2, processes=ranks)))
    assert isinstance(finding, Finding)
    assert (finding.evidence["rank"], finding.evidence["part"]) == (1, "before its forward")
