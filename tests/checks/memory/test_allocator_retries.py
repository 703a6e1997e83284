"""MEM002 through the real examine; the counters are a stand-in's, since a full GPU cannot be had here."""

import pytest
import torch
from torch import nn

from tests.checks.rules import Look, found_by, outcome_of
from tests.stand_ins import cuda_allocator

RETRIES = "allocator-retries"
MODEL = nn.Sequential(nn.Linear(16, 16))
COUNTED = {"num_alloc_retries": 12, "num_ooms": 0}
NONE = {"num_alloc_retries": 0, "num_ooms": 0}


def test_a_full_gpu(look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    assert outcome_of(RETRIES, look(MODEL)) == "not_applicable"
    assert not torch.cuda.is_initialized()
    assert "num_alloc_retries" in (torch.cuda.memory_stats.__doc__ or "")
    cuda_allocator.install(monkeypatch, NONE, COUNTED)
    facts = look(MODEL)
    assert facts.training.alloc_retries == 12
    finding = found_by(RETRIES, facts)
    assert finding.evidence["retries_in_this_process"] == 12
    assert "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in finding.treatment.code


@pytest.mark.parametrize(
    ("stats", "backend"),
    [(NONE, "cudaMallocAsync"), (RuntimeError("not supported"), "native"), ({}, "native")],
    ids=["asynchronous", "the user's own", "renamed"],
)
def test_counters_that_cannot_be_read_are_unknown(
    look: Look, monkeypatch: pytest.MonkeyPatch, stats: dict[str, int] | Exception, backend: str
) -> None:
    cuda_allocator.install(monkeypatch, stats, backend=backend)
    assert outcome_of(RETRIES, look(MODEL)) == "unknown"
