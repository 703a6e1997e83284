"""What torch.compile, autograd, autocast, progress bars and Transformer Engine leave in the process of a
trial is put back or ended."""

from __future__ import annotations

import threading
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from fp8doctor.facts import Target, Workload
from fp8doctor.loading.job import Job
from fp8doctor.stacks.torch_private import compiled_entries
from fp8doctor.trial.copies.step import VariantPlan
from fp8doctor.trial.measure import bench
from fp8doctor.trial.measure.attempt import Attempt
from fp8doctor.trial.measure.budget import Budget, TrialRun
from fp8doctor.trial.planning import as_it_is
from tests.trial.conftest import forgotten, one_round
from tests.trial.reach import Net, Reach, attempt, mend, trained

__all__ = ["forgotten", "one_round"]

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_round")]


# torch.compile


class Broken(Net):
    """Its graph breaks, so that its own method and ``mend`` are compiled as frames of their own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return self.mended(x)

    def mended(self, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return self.second(self.first(mend(x)))


@pytest.mark.usefixtures("forgotten")
def test_compiled_code_of_a_function_that_had_none_is_forgotten() -> None:
    job = trained(lambda reach: torch.compile(mend, backend="eager", dynamic=False)(torch.ones(5)))
    assert attempt(job).harm == ()
    assert compiled_entries(mend.__code__) == []


@pytest.mark.usefixtures("forgotten")
def test_workers_that_compiling_starts_are_ended() -> None:
    from torch._inductor.async_compile import AsyncCompile, shutdown_compile_workers

    shutdown_compile_workers()
    AsyncCompile.pool.cache_clear()
    before = {thread.ident for thread in threading.enumerate()}

    def compile_in_a_pool(reach: Reach) -> None:
        AsyncCompile.pool().submit(int).result()
        assert {thread.ident for thread in threading.enumerate()} - before

    assert attempt(trained(compile_in_a_pool)).harm == ()
    assert {thread.ident for thread in threading.enumerate()} == before
    assert AsyncCompile.pool().submit(lambda: 3).result() == 3
    AsyncCompile.pool().shutdown()
    AsyncCompile.pool.cache_clear()


# Transformer Engine


@pytest.mark.parametrize("flavour", ["quantization", "fp8"])
def test_transformer_engines_state_is_put_back_and_its_buffers_are_out_of_reach(
    flavour: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.stand_ins import transformer_engine

    transformer_engine.install(monkeypatch, flavour)
    manager: Any = transformer_engine.FP8GlobalStateManager
    amax = torch.ones(1)
    monkeypatch.setattr(manager, "global_amax_buffer", {"forward_key": [amax]}, raising=False)
    monkeypatch.setattr(manager, "autocast_arguments", {"key": 1}, raising=False)
    monkeypatch.setattr(manager, "enabled", False)
    seen: list[Any] = []

    def deed(reach: Reach) -> None:
        seen.append(dict(manager.global_amax_buffer))
        manager.enabled, manager.recipe = True, "planted"
        manager.global_amax_buffer["planted"] = [torch.ones(1)]
        manager.autocast_arguments["planted"] = 2

    buffer = manager.global_amax_buffer
    assert attempt(trained(deed)).harm == ()
    assert seen == [{}]
    assert (manager.enabled, manager.recipe, manager.autocast_arguments) == (False, None, {"key": 1})
    assert manager.global_amax_buffer is buffer
    assert list(buffer) == ["forward_key"]
    assert buffer["forward_key"][0] is amax


class Registers(nn.Linear):
    """A layer that registers at its first forward, as those of Transformer Engine do, and tells at each how
    many would be updated with it."""

    seen: ClassVar[list[int]] = []
    is_registered = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from tests.stand_ins.transformer_engine import FP8GlobalStateManager

        manager: Any = FP8GlobalStateManager
        if not self.is_registered:
            manager.global_amax_buffer.setdefault("forward_key", []).append(self.weight)
        self.is_registered = True
        self.seen.append(len(manager.global_amax_buffer["forward_key"]))
        return super().forward(x)


def test_scales_of_one_arm_are_updated_in_its_own_steps_only(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.stand_ins import transformer_engine

    transformer_engine.install(monkeypatch, "quantization")
    manager: Any = transformer_engine.FP8GlobalStateManager
    monkeypatch.setattr(manager, "global_amax_buffer", {}, raising=False)
    job = Job(
        model=nn.Sequential(Registers(8, 8), Registers(8, 8)),
        target=Target(),
        workload=Workload(accumulate=1),
        batch=torch.ones(2, 8),
    )
    of = bench.Bench(job, [], TrialRun(torch.device("cpu"), Budget(600)))
    for name in ("a", "b"):
        of.build(Attempt(VariantPlan(name, as_it_is)))
    of.close()
    assert set(Registers.seen[2:]) == {1, 2}, "never those of the other arm"
    assert len(manager.global_amax_buffer["forward_key"]) == 2, "of the first step, which no arm took"
