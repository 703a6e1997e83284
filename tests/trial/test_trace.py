"""Where the step goes: real trials on a CPU, profiled, and every way in which a profile may fail."""

from __future__ import annotations

import functools
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint
from torchao.float8 import convert_to_float8_training

from fp8doctor.facts import Arm, Breakdown, KernelGroup, Target, Trial, Workload, recorded
from fp8doctor.facts.arm_names import Reason
from fp8doctor.loading.job import Job
from fp8doctor.profiling.profiled_step import ProfiledStep, step_of
from fp8doctor.profiling.trace import MODULE, read_trace
from fp8doctor.trial.copies import depth
from fp8doctor.trial.copies.depth import Cut, Plan, Stack
from fp8doctor.trial.measure import bench, evidence, timer
from fp8doctor.trial.measure import profile_step as trace
from fp8doctor.trial.measure.budget import Budget
from fp8doctor.trial.measure.evidence import (
    ANOTHER_PROFILER,
    StepProof,
    compiled_so_far,
    counted_in,
    why_not_profiled,
)
from fp8doctor.trial.measure.profile_step import annotated
from fp8doctor.trial.measure.results import breakdown
from fp8doctor.trial.measure.trial_run import KeepTrace, TrialRun
from fp8doctor.trial.planning import eager_bf16
from fp8doctor.trial.variant import Variant, VariantPlan, as_it_is
from tests.trial.conducted import conduct

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """One round, one thread, cuts to one and two blocks, and a folder for temporary files in which nothing
    may be left."""
    monkeypatch.setattr(bench, "MOST_WARM_UP", bench.LEAST_WARM_UP)
    monkeypatch.setattr(timer, "LEAST_ROUNDS", 2)
    monkeypatch.setattr(timer, "MOST_ROUNDS", 2)
    monkeypatch.setattr(depth, "LEAST_WORTH_CUTTING", 4)
    monkeypatch.setattr(depth, "DEPTHS", ((1, 2),))
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    threads, level = torch.get_num_threads(), os.environ.get("KINETO_LOG_LEVEL")
    torch.set_num_threads(1)
    yield scratch
    torch.set_num_threads(threads)
    assert list(scratch.iterdir()) == []
    assert why_not_profiled() != ANOTHER_PROFILER
    assert os.environ.get("KINETO_LOG_LEVEL") == level


class Router(nn.Module):
    """A matrix product in fp32, planted."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.float() @ self.weight.float()).to(x.dtype)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(self.norm(x))


class Net(nn.Module):
    """Blocks of small layers, one much larger layer, and a router."""

    def __init__(self, blocks: int = 2, width: int = 32, times: int = 16, checkpointed: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.large = nn.Linear(width, times * width, bias=False)
        self.router = Router(width)
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.large(self.router(x))


def job(accumulate: int = 1, **settings: Any) -> Job:
    model = convert_to_float8_training(Net(**settings).bfloat16())
    model.router.float()
    return Job(
        model=model,
        target=Target(),
        workload=Workload(accumulate=accumulate),
        batch=torch.ones(16, 32, dtype=torch.bfloat16),
    )


def compiled_blocks(variant: Variant) -> Variant:
    for block in variant.model.blocks:  # type: ignore[union-attr]
        block.compile(backend="aot_eager")
    return variant


AS_IS = VariantPlan("as_is", as_it_is, fp8=True)
BF16 = VariantPlan("bf16", eager_bf16, fp8=False)
COMPILED = VariantPlan(
    "prescribed",
    compiled_blocks,
    ("compile-blocks",),
    fp8=True,
    base="as_is",
    change=compiled_blocks,
    compiled=True,
)


def trial(
    of: Job, *arms: VariantPlan, keep_trace: KeepTrace | None = None, skip: dict[str, str] | None = None
) -> Trial:
    return conduct(
        of,
        ["blocks"],
        arms,
        TrialRun(CPU, Budget(60), skip=skip or {}, keep_trace=keep_trace),
    )


def by_name(of: Trial) -> dict[str, Arm]:
    return {arm.name: arm for arm in of.arms}


@functools.cache
def deep() -> Trial:
    """A trial at two depths, which several tests look at."""
    return trial(job(blocks=26), AS_IS, BF16, COMPILED)


@functools.cache
def whole() -> Trial:
    """A trial without cuts: no part of it is an extrapolation of single steps of a busy CPU."""
    return trial(job(), AS_IS, BF16, COMPILED)


def modules(of: Breakdown) -> dict[str, dict[str, float]]:
    return {module.name: module.families_ms for module in of.modules}


# What a real trial tells


@pytest.mark.parametrize("name", ["as_is", "bf16", "prescribed"])
def test_parts_and_idle_time_add_up_to_the_step(name: str) -> None:
    for of in (deep(), whole()):
        arm = by_name(of)[name]
        assert arm.breakdown is not None
        assert arm.step_ms == pytest.approx(sum(arm.breakdown.families_ms.values()) + arm.breakdown.idle_ms)
        assert sum(arm.breakdown.families_ms.values()) * arm.breakdown.scale == pytest.approx(
            arm.breakdown.busy_ms
        )
        assert "trial.arms.breakdown" not in of.gaps
        assert of.harm == ()
    assert arm.breakdown.idle_ms >= 0


def compiled_in_place(model: Any) -> None:
    for block in model.blocks:
        block.compile(backend="aot_eager")


def compiled_by_wrappers(model: Any) -> None:
    for name, block in model.blocks.named_children():
        model.blocks[int(name)] = torch.compile(block, backend="aot_eager")


def compiled_forwards(model: Any) -> None:
    for block in model.blocks:
        block.forward = torch.compile(block.forward, backend="aot_eager")


def compiled_list(model: Any) -> None:
    """A list is never called: its mark does nothing."""
    model.blocks.compile(backend="aot_eager")


def compiled_in_vain(model: Any) -> None:
    """A mark that compiles no frame of its layer; every function that the layer's call meets is compiled, so
    are hooks."""
    model.router = nn.Sequential(nn.Linear(32, 32, dtype=torch.bfloat16))
    model.router.compile(backend="aot_eager")


def compiled_whole(model: Any) -> None:
    model.compile(backend="aot_eager")


IN_BLOCKS = {"blocks.0", "blocks.0.norm", "blocks.0.linear", "blocks.1", "blocks.1.norm", "blocks.1.linear"}
BESIDE = {"large", "router"}


@pytest.mark.gate("compiled_in_place-named0", "compiled_whole-named5")
@pytest.mark.parametrize(
    ("change", "named"),
    [
        (compiled_in_place, BESIDE),
        (compiled_by_wrappers, BESIDE),
        (compiled_forwards, BESIDE),
        (compiled_list, IN_BLOCKS | BESIDE),
        (compiled_in_vain, IN_BLOCKS | {"large"}),
        (compiled_whole, set()),
    ],
)
def test_names_compile_nothing(
    change: Callable[[Any], None], named: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    of, compiled_nothing = job(), watch_profiles(monkeypatch)
    change(of.model)
    (arm,) = trial(of, AS_IS).arms
    assert modules(arm.breakdown).keys() == named  # type: ignore[arg-type]
    assert compiled_nothing == [True]


def watch_profiles(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each profile that is made from now on compiled nothing."""
    found = []

    def watched(*arguments: Any, **options: Any) -> Any:
        before = compiled_so_far()
        profile = evidence.profiled(*arguments, **options)
        found.append(compiled_so_far() == before)
        return profile

    monkeypatch.setattr(trace, "profiled", watched)
    return found


# Which arms


def explained(of: Trial) -> set[str]:
    return {arm.name for arm in of.arms if recorded(arm, "breakdown") and arm.breakdown is not None}


def test_a_refused_baseline_gives_its_place_to_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        trace, "full_ms", lambda plan, samples, arm: [1.0 if arm.name == "bf16_compiled" else 2.0] * 6
    )
    of = trial(job(), AS_IS, BF16, replace(BF16, name="bf16_compiled", compiled=True))
    assert by_name(of)["bf16_compiled"].reason == "nothing in it was compiled"
    assert explained(of) == {"as_is", "bf16"}


def test_what_a_trace_proves_is_what_the_raw_events_prove(tmp_path: Path) -> None:
    step = compiled_blocks(Variant(job().model, None)).model
    inputs = torch.ones(16, 32, dtype=torch.bfloat16)
    step(inputs).sum().backward()
    profile = evidence.profiled(lambda: step(inputs).sum().backward(), CPU, to_read=True)
    profile.export_chrome_trace(str(tmp_path / "trace.json"))
    in_trace, raw = (
        counted_in(read_trace(tmp_path / "trace.json"), CPU),
        evidence.counted(profile.profiler, CPU),
    )
    assert (
        in_trace == replace(raw, uncompiled_linears=None) == StepProof(3 * 3, 2)
    )  # a trace names no forward


# What fails


def fails(*arguments: Any, **options: Any) -> Any:
    raise RuntimeError("planted")


FAILURES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "the export": lambda patch: patch.setattr(torch.profiler.profile, "export_chrome_trace", fails),
    "reading": lambda patch: patch.setattr(trace, "read_trace", fails),
    "the analysis": lambda patch: patch.setattr(trace, "step_of", fails),
    "whoever keeps the trace": lambda patch: None,
}


@pytest.mark.gate("the export", "whoever keeps the trace")
@pytest.mark.parametrize("what", FAILURES)
def test_a_failure_costs_the_breakdown_and_nothing_else(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    FAILURES[what](monkeypatch)
    of = trial(job(), AS_IS, BF16, keep_trace=fails if what == "whoever keeps the trace" else None)
    arms = by_name(of)
    assert of.gaps["trial.arms.breakdown"] == "profiling a step fails with RuntimeError: planted"
    assert [arm.breakdown for arm in of.arms if recorded(arm, "breakdown")] == []
    assert {name: (arm.tried, arm.fp8_gemms, arm.graphs_run) for name, arm in arms.items()} == {
        "as_is": (True, 9, 0),
        "bf16": (True, 0, 0),
    }
    assert of.harm == ()


def test_the_users_profiler_goes_on() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as users:
        torch.ones(3).cumsum(0)
        of = trial(job(), AS_IS, BF16, COMPILED)
        torch.ones(3).cumprod(0)
    raw: Any = users.profiler
    assert {"aten::cumsum", "aten::cumprod"} <= {event.name() for event in raw.kineto_results.events()}
    assert of.gaps["trial.arms.breakdown"] == ANOTHER_PROFILER
    assert {name: arm.why for name, arm in by_name(of).items()} == {
        "as_is": Reason.FP8_UNSEEN,
        "bf16": None,
        "prescribed": Reason.FP8_UNSEEN,
    }


# Annotations


class Stumbling(nn.Module):
    """Its second module raises, and the model goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(8, 8), nn.Linear(9, 9), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        try:
            x = self.second(x)
        except RuntimeError:
            x = self.third(x)
        return x


def test_a_call_that_raises_is_closed_and_no_hook_stays(small: Path) -> None:
    model = Stumbling()
    with (
        annotated(dict(model.named_modules())),
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile,
    ):
        model(torch.ones(4, 8)).sum().backward()
    assert not any(
        module._forward_hooks or module._forward_pre_hooks or module._forward_hooks_always_called
        for module in model.modules()
    )
    file = small / "trace.json"
    profile.export_chrome_trace(str(file))
    events = [
        event for event in json.loads(file.read_text())["traceEvents"] if event["name"].startswith(MODULE)
    ]
    told = {module.name: module.families_ms for module in step_of(read_trace(file)).modules}
    file.unlink()
    spans = {event["name"].rpartition(" ")[2]: (event["ts"], event["ts"] + event["dur"]) for event in events}
    assert spans.keys() == {"", "first", "second", "third"}
    assert spans["second"][1] <= spans["third"][0]
    assert {"first", "third"} <= told.keys()


# From the cuts to full depth

PLAN = Plan((Stack("blocks", 26, 0, 1),), (Cut({"blocks": 4}), Cut({"blocks": 12})))


def at(
    busy_ms: float,
    kernels: int = 10,
    unclassified_ms: float = 0.0,
    groups: tuple[KernelGroup, ...] = (),
    **families_ms: float,
) -> ProfiledStep:
    return ProfiledStep(
        families_ms=families_ms,
        busy_ms=busy_ms,
        host_wait_pct=None,
        kernels=kernels,
        unclassified_ms=unclassified_ms,
        groups=groups,
        modules=(),
    )  # type: ignore[arg-type]


def test_every_family_is_on_the_line_of_the_step() -> None:
    shallow, deepest = (
        at(10.0, 100, 1.0, cast=4.0, gemm_fp8=5.0, unknown=1.0),
        at(26.0, 260, 1.0, cast=12.0, gemm_fp8=13.0, unknown=1.0),
    )
    told = breakdown(PLAN, [shallow, deepest], 60.0, 1.0)
    assert told.families_ms == pytest.approx({"cast": 26.0, "gemm_fp8": 27.0, "unknown": 1.0})
    assert (told.busy_ms, told.idle_ms, told.scale, told.kernels, told.reliable) == (
        54.0,
        6.0,
        1.0,
        540,
        True,
    )
    assert told.unclassified_pct == pytest.approx(100 / 54)


@pytest.mark.parametrize(("waited_ms", "communication_ms", "scale"), [(20.0, 10.0, 1.0), (4.0, 0.0, 1.1)])
def test_waiting_for_other_ranks_beyond_the_step_makes_nothing_else_shorter(
    waited_ms: float, communication_ms: float, scale: float
) -> None:
    step = at(50.0 * scale + waited_ms, cast=50.0 * scale, communication=waited_ms)
    told = breakdown(Plan((), (Cut({}),)), [step], 50.0 + communication_ms, 1.0)
    assert told.families_ms == pytest.approx({"cast": 50.0, "communication": communication_ms})
    assert (told.scale, told.idle_ms) == pytest.approx((scale, 0.0))


@given(st.lists(st.tuples(*[st.floats(0, 1e3)] * 3), min_size=2, max_size=2), st.floats(1e-3, 1e5))
def test_parts_always_add_up(cuts: list[tuple[float, ...]], step_ms: float) -> None:
    told = breakdown(
        PLAN, [at(sum(parts), cast=parts[0], copy=parts[1], norm=parts[2]) for parts in cuts], step_ms, 1.0
    )
    assert sum(told.families_ms.values()) + told.idle_ms == pytest.approx(step_ms)
    assert told.idle_ms >= 0
    assert all(part >= 0 for part in told.families_ms.values())
