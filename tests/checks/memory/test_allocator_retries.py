"""MEM002 through the real examine; the counters are a stand-in's, since a full GPU cannot be had here."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
import torch
from torch import nn

from fp8doctor.checks.memory.allocator_retries import allocator_retries
from fp8doctor.examine import torch_state
from fp8doctor.examine.torch_state import examine_allocator, not_the_users
from fp8doctor.facts import ArmCut, Facts, Gpu
from fp8doctor.finding import Finding, NotApplicable
from fp8doctor.registry import discover, run, select
from tests.checks.arms import ran, timed
from tests.stand_ins import cuda_allocator

Look = Callable[..., Facts]
MODEL = nn.Sequential(nn.Linear(16, 16))
COUNTED = {"num_alloc_retries": 12, "num_ooms": 0}
NONE = {"num_alloc_retries": 0, "num_ooms": 0}


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)


def outcome(facts: Facts) -> str:
    return run(select(discover(), ["MEM002"]), facts)[1][0].outcome


def on_a_gpu(facts: Facts) -> Facts:
    return msgspec.structs.replace(facts, gpus=(Gpu(name="NVIDIA H100", visible=True, memory_gib=79.1),))


def test_a_full_gpu(look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda_allocator.install(monkeypatch, NONE, COUNTED)
    facts = look(MODEL)
    assert facts.training.alloc_retries == 12
    finding = allocator_retries(facts)
    assert isinstance(finding, Finding)
    assert finding.title == "The GPU had too little free memory: the allocator retried 12 times so far"
    assert finding.treatment is not None
    assert finding.treatment.code == "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"


def test_segments_that_grow_treat_it(look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    cuda_allocator.install(monkeypatch, NONE)
    assert outcome(look(MODEL)) == "healthy"


def test_retries_of_a_trial_are_not_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_state, "_by_trials", 0)
    counted = dict(COUNTED)
    cuda_allocator.install(monkeypatch, counted)
    with not_the_users():
        counted["num_alloc_retries"] += 30
    counted["num_alloc_retries"] += 1
    assert examine_allocator({}) == 13


@pytest.mark.parametrize("variable", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_what_is_set_already_is_not_advised(
    look: Look, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "max_split_size_mb:512,expandable_segments:True")
    cuda_allocator.install(monkeypatch, COUNTED)
    finding = allocator_retries(look(MODEL))
    assert isinstance(finding, Finding)
    assert finding.treatment is not None
    assert finding.treatment.name == "less-memory"


def test_without_cuda_there_is_no_question(look: Look) -> None:
    facts = look(MODEL)
    assert facts.training.alloc_retries is None
    assert isinstance(allocator_retries(facts), NotApplicable)
    assert not torch.cuda.is_initialized()


@pytest.mark.parametrize(
    ("stats", "backend", "reason"),
    [
        (NONE, "cudaMallocAsync", "cudaMallocAsync does not count"),
        (RuntimeError("not supported by a pluggable allocator"), "native", "pluggable allocator"),
        ({}, "native", "num_alloc_retries"),
    ],
    ids=["asynchronous", "the user's own", "renamed"],
)
def test_counters_that_cannot_be_read_are_unknown(
    look: Look, monkeypatch: pytest.MonkeyPatch, stats: dict[str, int] | Exception, backend: str, reason: str
) -> None:
    cuda_allocator.install(monkeypatch, stats, backend=backend)
    gaps: dict[str, str] = {}
    examine_allocator(gaps)
    assert reason in gaps["training.alloc_retries"]
    assert outcome(look(MODEL)) == "unknown"


@pytest.mark.parametrize(
    ("peak_gib", "retries", "expected"),
    [(76.0, (0, 3), "sick"), (76.0, (0, 0), "healthy"), (40.0, (0, 3), "healthy"), (None, (3,), "healthy")],
    ids=["the step fills the GPU", "full, without retries", "our copies filled it", "peak unknown"],
)
def test_retries_of_the_trial(
    look: Look,
    monkeypatch: pytest.MonkeyPatch,
    peak_gib: float | None,
    retries: tuple[int, ...],
    expected: str,
) -> None:
    cuda_allocator.install(monkeypatch, NONE)
    as_is = ran("as_is", peak_gib=peak_gib, cuts=tuple(ArmCut(alloc_retries=each) for each in retries))
    other = ran("bf16", peak_gib=78.0, cuts=(ArmCut(alloc_retries=9),))
    assert outcome(on_a_gpu(timed(look(MODEL), as_is, other))) == expected


def test_the_counter_is_torchs_own() -> None:
    """The name that is read, in the documentation of the installed torch."""
    assert "num_alloc_retries" in (torch.cuda.memory_stats.__doc__ or "")
