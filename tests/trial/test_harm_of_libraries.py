"""What torch.compile, autograd, autocast, progress bars and Transformer Engine leave in the process of a
trial is put back or ended."""

from __future__ import annotations

import gc
import io
import threading
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from fp8doctor.facts import Target, Workload
from fp8doctor.loading.job import Job
from fp8doctor.trial.measure import bench
from fp8doctor.trial.measure.attempt import Attempt
from fp8doctor.trial.planning import as_it_is
from fp8doctor.trial.variant import VariantPlan
from tests.trial.reach import Net, Reach, attempt, mend, trained
from tests.trial.users_state import entries

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
    assert entries(mend) == []


@pytest.mark.usefixtures("forgotten")
@pytest.mark.parametrize(
    "deed",
    [
        lambda reach: torch._dynamo.reset(),
        lambda reach: torch.compile(mend, backend="eager", dynamic=False)(torch.ones(5)),
    ],
    ids=["forgotten", "one more"],
)
def test_what_the_user_compiled_is_watched(deed: Callable[[Reach], object]) -> None:
    torch.compile(mend, backend="eager", dynamic=False)(torch.ones(2))
    job = trained(deed)
    assert attempt(job).harm == ("compiled code of the model",)


@pytest.mark.usefixtures("forgotten")
def test_a_broken_graph_of_the_user_gets_no_entries_of_replicas() -> None:
    job = trained()
    job.model = Broken(Reach())
    job.model.compile(backend="eager")
    job.model(job.batch).sum().backward()
    job.optimizer = None
    before = entries(Broken.forward), entries(Broken.mended), entries(mend)
    assert [len(each) > 0 for each in before] == [True, True, False]
    assert attempt(job).harm == ()
    assert (entries(Broken.forward), entries(Broken.mended), entries(mend)) == before


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


def test_the_timer_of_compile_workers_is_no_harm() -> None:
    """It ends by itself; a trial on a GPU that compiles leaves it behind."""
    from torch._inductor.compile_worker.timer import Timer

    timers: list[Timer] = []

    def start(reach: Reach) -> None:
        timers.append(Timer(0.2, lambda: None))
        timers[0].record_call()

    assert attempt(trained(start)).harm == ()
    timers[0].quit()


def test_the_threads_of_autograd_are_no_harm() -> None:
    """It runs a backward on a GPU, and one that is nested deeply, in a thread that Python did not start."""
    asked: set[int] = set()

    class Nested(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, depth: int) -> torch.Tensor:
            ctx.depth = depth
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
            asked.add(threading.current_thread().ident or 0)
            if ctx.depth:
                with torch.enable_grad():
                    Nested.apply(torch.ones(1, requires_grad=True), ctx.depth - 1).sum().backward()
            return gradient, None

    deeply = lambda reach: Nested.apply(torch.ones(1, requires_grad=True), 70).sum().backward()  # noqa: E731
    assert attempt(trained(deeply)).harm == ()
    assert asked & {each.ident for each in threading.enumerate() if isinstance(each, threading._DummyThread)}


def test_the_monitor_of_a_progress_bar_is_ended() -> None:
    """Inductor shows progress with tqdm, which starts a thread."""
    from tqdm import tqdm

    if tqdm.monitor is not None:
        tqdm.monitor.exit()
    tqdm.monitor = None
    assert attempt(trained(lambda reach: tqdm(total=1, file=io.StringIO()).close())).harm == ()
    assert tqdm.monitor is None


def test_autocasts_cache_keeps_no_replica_alive() -> None:
    weights: list[weakref.ref[torch.Tensor]] = []

    class Noting(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weights.append(weakref.ref(self.first.weight))
            return super().forward(x)

    job = trained()
    job.model.__class__ = Noting
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attempt(job).harm == ()
        gc.collect()
        assert weights
        assert {weight() for weight in weights} == {None}


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
    of = bench.Bench(job, [], torch.device("cpu"))
    for name in ("a", "b"):
        of.build(Attempt(VariantPlan(name, as_it_is)))
    of.close()
    assert set(Registers.seen[2:]) == {1, 2}, "never those of the other arm"
    assert len(manager.global_amax_buffer["forward_key"]) == 2, "of the first step, which no arm took"
