"""DST002 on real FSDP2 and torchao models, before and after steps with and without the call."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

from fp8doctor.facts import Facts
from tests.checks.distributed.sharded import blocks, float8, needs_a_sharded_step, processes, shard, step
from tests.checks.environment.live import finding_of, outcome_of

Look = Callable[..., Facts]


@pytest.fixture
def eight() -> Iterator[None]:
    with processes(8):
        yield


@pytest.mark.slow
@needs_a_sharded_step
def test_a_step_without_the_call(eight: None, look: Look) -> None:
    model = shard(float8(all_gather=True))
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    finding = finding_of("DST002", look(model, optimizer=optimizer))
    assert finding is not None
    assert finding.severity == "warning"
    assert finding.title == "4 of 4 weights gathered in FP8 have no precomputed scale"


@needs_a_sharded_step
def test_the_treatment_makes_it_silent(eight: None, look: Look) -> None:
    model = shard(float8(all_gather=True))
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    finding = finding_of("DST002", look(model, optimizer=optimizer))
    assert finding is not None
    assert finding.treatment is not None
    exec(finding.treatment.code, {"model": model})
    assert outcome_of("DST002", look(model, optimizer=optimizer)).outcome == "healthy"
    step(model, optimizer)
    precompute_float8_dynamic_scale_for_fsdp(model)
    assert outcome_of("DST002", look(model, optimizer=optimizer)).outcome == "healthy"


@pytest.mark.parametrize("with_optimizer", [False, True])
def test_before_the_first_step_it_is_information(with_optimizer: bool, eight: None, look: Look) -> None:
    model = shard(float8(all_gather=True))
    optimizer = torch.optim.AdamW(model.parameters()) if with_optimizer else None
    finding = finding_of("DST002", look(model, optimizer=optimizer))
    assert finding is not None
    assert finding.severity == "info"
    assert finding.evidence["optimizer_stepped"] is False


def test_looking_asks_for_no_collective_and_changes_no_scale(
    eight: None, look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = shard(float8(all_gather=True))
    called: list[str] = []
    for name in ("all_reduce", "all_gather_into_tensor", "barrier"):
        monkeypatch.setattr(torch.distributed, name, lambda *args, name=name, **kwargs: called.append(name))
    look(model)
    assert called == []
    assert model[0][0].weight._local_tensor._precomputed_scale is None


@needs_a_sharded_step
def test_one_process_computes_each_scale_alone(look: Look) -> None:
    with processes(1):
        model = shard(float8(all_gather=True))
        optimizer = torch.optim.AdamW(model.parameters())
        step(model, optimizer)
        finding = finding_of("DST002", look(model, optimizer=optimizer))
    assert finding is not None
    assert finding.severity == "warning"


def test_where_nothing_is_gathered_in_fp8(eight: None, look: Look) -> None:
    for model in (shard(float8(all_gather=False)), shard(blocks()), float8(all_gather=True)):
        assert outcome_of("DST002", look(model)).outcome == "not_applicable"
