"""DST005 on profiles of several ranks; the ownership of time is that of a real trace's reader."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from fp8doctor.checks.distributed.exposed_communication import exposed_communication
from fp8doctor.facts import Breakdown, Distributed, Facts, Observation, Rank, Ranks, Training
from fp8doctor.finding import Finding, NotApplicable


def profiled(communication_ms: float, clock: str = "cuda") -> Observation:
    families = {"gemm_fp8": 60.0, "communication": communication_ms}
    return Observation(steps_ms=(100.0,) * 3, clock=clock, breakdown=Breakdown(families_ms=families))  # type: ignore[arg-type]


def job(*communication_ms: float, wrapper: str | None = "DDP", world: int = 2, clock: str = "cuda") -> Facts:
    seen = [profiled(ms, clock) for ms in communication_ms]
    return Facts(
        observed=seen[0],
        training=Training(distributed=Distributed(world_size=world, wrapper=wrapper)),  # type: ignore[arg-type]
        ranks=Ranks(
            world_size=world,
            processes=tuple(Rank(rank=number, observed=each) for number, each in enumerate(seen)),
        ),
    )


def test_the_rank_that_waits_least_tells() -> None:
    finding = exposed_communication(job(40.0, 15.0))
    assert isinstance(finding, Finding)
    assert finding.title == "Exposed communication takes 15.0 of 100.0 ms/step in your script (15%)"
    assert (finding.evidence["exposed_ms"], finding.evidence["longest_ms"]) == (15.0, 40.0)
    assert finding.saving_ms is not None
    assert (finding.saving_ms.low, finding.saving_ms.high) == (0.0, 15.0)


def test_what_others_wait_for_is_no_communication() -> None:
    assert exposed_communication(job(40.0, 2.0)) is None


def test_tenths_of_a_ms_are_not_told() -> None:
    facts = job(40.0)
    short = replace(
        facts.observed,
        steps_ms=(2.0,) * 3,
        breakdown=replace(facts.observed.breakdown, families_ms={"communication": 0.5}),
    )
    assert (
        exposed_communication(replace(facts, observed=short, ranks=Ranks(world_size=2, processes=()))) is None
    )


@pytest.mark.parametrize(
    ("wrapper", "line"),
    [("DDP", "model.no_sync()"), ("FSDP2", "set_modules_to_forward_prefetch"), (None, "2 * batch_size")],
)
def test_the_lines_fit_the_wrapper(wrapper: str | None, line: str) -> None:
    """A larger batch is other work, which no ms of the step bound: it stands in no fix that has a saving."""
    finding = exposed_communication(job(40.0, 30.0, wrapper=wrapper))
    assert isinstance(finding, Finding)
    assert finding.treatment is not None
    assert line in finding.treatment.code
    assert (finding.saving_ms is None) == ("batch_size" in finding.treatment.code)


@pytest.mark.parametrize(
    "facts", [job(40.0, world=1), job(40.0, clock="host")], ids=["one process", "on a CPU"]
)
def test_where_the_question_does_not_arise(facts: Facts) -> None:
    assert isinstance(exposed_communication(facts), NotApplicable)
