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

from fp8doctor import inspect_model
from fp8doctor.facts import Arm, Breakdown, KernelGroup, Target, Trial, Workload, recorded
from fp8doctor.loading.job import Job
from fp8doctor.profiling.profiled_step import ProfiledStep, step_of
from fp8doctor.profiling.trace import MODULE, Event, Trace, read_trace
from fp8doctor.trial.conductor import conduct
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


def test_fp8_and_casts_are_in_the_fp8_step_only() -> None:
    families = {arm.name: arm.breakdown.families_ms for arm in whole().arms}  # type: ignore[union-attr]
    assert families["as_is"]["gemm_fp8"] > 0
    assert families["as_is"]["cast"] > 0
    assert families["prescribed"]["gemm_fp8"] > 0
    assert not {"gemm_fp8", "cast"}.intersection(families["bf16"])


def test_kernels_are_those_of_the_whole_model() -> None:
    deep_cut, one_cut = (by_name(of)["as_is"].breakdown for of in (deep(), whole()))
    assert deep_cut is not None
    assert one_cut is not None
    in_blocks = {
        name: sum(group.count for group in told.groups)
        for name, told in (("deepest", deep_cut), ("whole", one_cut))
    }
    assert in_blocks["deepest"] == in_blocks["whole"] == one_cut.kernels
    assert [group.count for group in deep_cut.groups if group.name == "aten::_scaled_mm"] == [3 * (2 + 1)]
    assert 26 / 3 * one_cut.kernels < deep_cut.kernels < 26 / 2 * one_cut.kernels


def test_modules_are_named_outside_of_compiled_regions() -> None:
    arms = by_name(deep())
    assert {"blocks.0.norm", "blocks.1.linear", "large", "router"} <= modules(arms["as_is"].breakdown).keys()  # type: ignore[arg-type]
    kinds = {module.name: module.kind for module in arms["as_is"].breakdown.modules}  # type: ignore[union-attr]
    assert kinds["large"] == "torchao.float8.float8_linear.Float8Linear"
    assert kinds["router"] == f"{__name__}.Router"
    assert arms["prescribed"].graphs_run == 2
    assert modules(arms["prescribed"].breakdown).keys() == {"large", "router"}  # type: ignore[arg-type]


def test_the_layer_with_the_largest_casts_leads_and_fp32_has_a_name() -> None:
    told = modules(by_name(trial(job(times=256), AS_IS))["as_is"].breakdown)  # type: ignore[arg-type]
    casts = {name: families.get("cast", 0.0) for name, families in told.items()}
    assert max(casts, key=lambda name: casts[name]) == "large"
    assert [name for name, families in told.items() if families.get("gemm_fp32")] == ["router"]


def test_beside_compiled_blocks_a_module_keeps_all_that_is_its_own() -> None:
    """Forward and backward: a node of the backward is a layer's own though its neighbors are graphs."""
    arm = by_name(whole())["prescribed"]
    told = modules(arm.breakdown)  # type: ignore[arg-type]
    assert told["router"]["gemm_fp32"] == pytest.approx(
        arm.breakdown.families_ms["gemm_fp32"] * arm.breakdown.scale
    )  # type: ignore[union-attr]
    assert 0 < told["large"]["gemm_fp8"] < arm.breakdown.families_ms["gemm_fp8"] * arm.breakdown.scale  # type: ignore[union-attr]


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


class Attending(nn.Module):
    """Calls a compiled function, as attention that is compiled by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(32, 32, bias=False, dtype=torch.bfloat16)
        self.attend = torch.compile(lambda x: x + torch.mm(x, x.T).softmax(-1) @ x, backend="aot_eager")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attend(self.query(x))  # type: ignore[no-any-return]


def calling_a_compiled_function(model: Any) -> None:
    model.router = Attending()


IN_BLOCKS = {"blocks.0", "blocks.0.norm", "blocks.0.linear", "blocks.1", "blocks.1.norm", "blocks.1.linear"}
BESIDE = {"large", "router"}


@pytest.mark.gate("compiled_in_place-named0", "compiled_whole-named6")
@pytest.mark.parametrize(
    ("change", "named"),
    [
        (compiled_in_place, BESIDE),
        (compiled_by_wrappers, BESIDE),
        (compiled_forwards, BESIDE),
        (compiled_list, IN_BLOCKS | BESIDE),
        (compiled_in_vain, IN_BLOCKS | {"large"}),
        (calling_a_compiled_function, IN_BLOCKS | BESIDE | {"router.query"}),
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


@pytest.mark.nightly
def test_a_compiled_step_names_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even where it goes on eagerly, in which every function it meets is compiled, so are hooks."""

    @torch.compile(backend="aot_eager")
    def training_step(model: Any, batch: torch.Tensor) -> torch.Tensor:
        for block in model.blocks:
            torch._dynamo.graph_break()
            batch = block(batch)
        return batch.float().mean()

    compiled_nothing = watch_profiles(monkeypatch)
    (arm,) = trial(replace(job(), training_step=training_step), AS_IS).arms
    assert arm.graphs_run
    assert arm.breakdown.modules == ()  # type: ignore[union-attr]
    assert compiled_nothing == [True]


def test_what_a_name_compiles_after_all_is_profiled_anew_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a region that no mark shows torch 2.13 compiles anew for the hooks that name modules, 2.14 does not:
    this module does so under both."""

    class Guarded(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self._forward_pre_hooks:
                return torch.compile(torch.nn.functional.relu6, backend="aot_eager")(x)  # type: ignore[no-any-return]
            return x

    def guard(variant: Variant) -> Variant:
        variant.model.router = Guarded()
        return variant

    compiled_nothing = watch_profiles(monkeypatch)
    (arm,) = trial(job(), replace(AS_IS, make=guard)).arms
    assert compiled_nothing == [False, True]
    assert arm.breakdown.modules == ()  # type: ignore[union-attr]


@pytest.mark.nightly
def test_a_region_that_no_mark_shows_keeps_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model holds it beside its modules: it is profiled without names, or, from torch 2.14 on, as part of
    what calls it."""

    class Hidden(nn.Module):
        def __init__(self, inside: nn.Module) -> None:
            super().__init__()
            self.__dict__["held"] = nn.Sequential(inside)
            self.held.compile(backend="aot_eager")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.held(x)  # type: ignore[no-any-return]

    def hide(variant: Variant) -> Variant:
        variant.model.after = nn.Linear(32, 32, bias=False, dtype=torch.bfloat16)
        variant.model.router = Hidden(variant.model.after)
        return variant

    compiled_nothing = watch_profiles(monkeypatch)
    (arm,) = trial(job(), replace(AS_IS, make=hide)).arms
    assert compiled_nothing[-1]
    named = modules(arm.breakdown)  # type: ignore[arg-type]
    assert bool(named) == (len(compiled_nothing) == 1)
    assert "after" not in named
    assert not named or named["router"]["gemm_16bit"] > 0


@pytest.mark.nightly
def test_a_recomputed_module_keeps_its_name() -> None:
    plain, twice = (by_name(trial(job(checkpointed=again), AS_IS))["as_is"] for again in (False, True))
    assert (plain.fp8_gemms, twice.fp8_gemms) == (3 * 3, 3 * 3 + 2)
    for arm in (plain, twice):
        assert arm.breakdown is not None
        assert modules(arm.breakdown)["blocks.1.linear"]["gemm_fp8"] > 0


def test_a_step_is_all_its_micro_batches() -> None:
    once, thrice = (by_name(trial(job(accumulate=times), AS_IS))["as_is"] for times in (1, 3))

    def products(arm: Arm) -> int:
        return sum(group.count for group in arm.breakdown.groups if group.name == "aten::_scaled_mm")  # type: ignore[union-attr]

    assert products(thrice) == 3 * products(once) == thrice.fp8_gemms
    assert thrice.step_ms == pytest.approx(
        sum(thrice.breakdown.families_ms.values()) + thrice.breakdown.idle_ms
    )  # type: ignore[union-attr]


def test_through_inspect_model() -> None:
    of = job()
    report = inspect_model(of.model, of.batch, device="cpu", budget_s=60)
    assert "as_is" in explained(report.facts.trial)
    assert "large" in modules(by_name(report.facts.trial)["as_is"].breakdown)  # type: ignore[arg-type]


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


def test_a_model_without_fp8_explains_its_best_conversion(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        trace, "full_ms", lambda plan, samples, arm: [1.0 if arm.name == "float8_rowwise" else 2.0] * 6
    )
    plain = VariantPlan("as_is", eager_bf16, fp8=False)
    of = trial(
        job(),
        plain,
        *(VariantPlan(f"float8_{recipe}", as_it_is, fp8=True) for recipe in ("tensorwise", "rowwise")),
    )
    assert explained(of) == {"as_is", "float8_rowwise"}


def test_the_fastest_exploration_is_explained_in_place_of_the_prescription(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        trace, "full_ms", lambda plan, samples, arm: [1.0 if arm.name == "better" else 2.0] * 6
    )
    all_fixes = VariantPlan("prescribed", as_it_is, ("fixed",), fp8=True, base="as_is")
    better = VariantPlan("better", as_it_is, ("better",), fp8=True, base="as_is", explored=True)
    of = trial(job(), AS_IS, BF16, all_fixes, better)
    assert explained(of) == {"as_is", "bf16", "better"}
    assert by_name(of)["prescribed"].breakdown is None


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


@pytest.mark.parametrize(
    ("kernels", "fp8_gemms"),
    [
        (["nvjet_sm90_qqtst_256x128_128x4_1x2_h_bz_coopA_TNT", "nvjet_sm90_tst_64x8", "a copy"], 1),
        (["nvjet_sm90_tst_64x8"], 0),
        ([], None),
    ],
)
def test_on_a_gpu_kernels_prove_fp8_and_a_trace_without_any_proves_nothing(
    kernels: list[str], fp8_gemms: int | None
) -> None:
    events = [Event(cat="kernel", name=name) for name in kernels]
    host = [Event(cat="cpu_op", name=name) for name in ("aten::_scaled_mm", "Torch-Compiled Region: 0/0")]
    seen = Trace(gpu=events, host={1: host}, launches={}, links=[])
    assert counted_in(seen, torch.device("cuda")) == StepProof(fp8_gemms, 1)


def test_a_profile_that_is_read_is_not_counted_by_its_raw_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are slow: a second and more for each second of an eager FP8 step."""
    monkeypatch.setattr(evidence, "counted", fails)
    (arm,) = trial(job(), AS_IS).arms
    assert (arm.fp8_gemms, recorded(arm, "breakdown")) == (9, True)


# What fails


def fails(*arguments: Any, **options: Any) -> Any:
    raise RuntimeError("planted")


FAILURES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "the profiler": lambda patch: patch.setattr(torch.profiler.profile, "start", fails),
    "the export": lambda patch: patch.setattr(torch.profiler.profile, "export_chrome_trace", fails),
    "reading": lambda patch: patch.setattr(trace, "read_trace", fails),
    "the analysis": lambda patch: patch.setattr(trace, "step_of", fails),
    "whoever keeps the trace": lambda patch: None,
}


@pytest.mark.gate("the profiler", "whoever keeps the trace")
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
    assert {name: (arm.tried, arm.fp8_gemms) for name, arm in by_name(of).items()} == {
        "as_is": (True, 9),
        "bf16": (True, 0),
        "prescribed": (True, 9),
    }
    assert by_name(of)["prescribed"].graphs_run == 2


def test_a_process_that_died_of_a_profile_is_followed_by_one_without() -> None:
    of = trial(job(), AS_IS, skip={"breakdown": "the process was killed by SIGSEGV"})
    assert of.gaps["trial.arms.breakdown"] == "the process was killed by SIGSEGV"
    assert by_name(of)["as_is"].tried


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


def test_a_trace_that_is_kept_holds_the_annotations_of_the_deepest_cut(tmp_path: Path) -> None:
    def keep(arm: str, file: Path) -> None:
        (tmp_path / f"{arm}.json").write_bytes(file.read_bytes())

    trial(job(blocks=26), AS_IS, COMPILED, keep_trace=keep)
    kept = {path.stem: json.loads(path.read_text())["traceEvents"] for path in tmp_path.glob("*.json")}
    names = {
        arm: {event["name"].rpartition(" ")[2] for event in events if event["name"].startswith(MODULE)}
        for arm, events in kept.items()
    }
    assert kept.keys() == {"as_is", "prescribed"}
    assert {"blocks.1.linear", "router"} <= names["as_is"]
    assert names["prescribed"] == {"large", "router"}


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
        window_ms=2 * busy_ms,
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


@pytest.mark.parametrize(("step_ms", "reliable"), [(50.0, True), (47.5, True), (46.0, False)])
def test_more_busy_than_the_step_is_scaled_until_it_says_nothing(step_ms: float, reliable: bool) -> None:
    told = breakdown(PLAN, [at(10.0, cast=10.0), at(26.0, cast=26.0)], step_ms, 1.0)
    assert told.families_ms == pytest.approx({"cast": step_ms})
    assert (told.busy_ms, told.idle_ms, told.scale) == pytest.approx((54.0, 0.0, 54.0 / step_ms))
    assert told.reliable is reliable


@pytest.mark.parametrize(("waited_ms", "communication_ms", "scale"), [(20.0, 10.0, 1.0), (4.0, 0.0, 1.1)])
def test_waiting_for_other_ranks_beyond_the_step_makes_nothing_else_shorter(
    waited_ms: float, communication_ms: float, scale: float
) -> None:
    step = at(50.0 * scale + waited_ms, cast=50.0 * scale, communication=waited_ms)
    told = breakdown(Plan((), (Cut({}),)), [step], 50.0 + communication_ms, 1.0)
    assert told.families_ms == pytest.approx({"cast": 50.0, "communication": communication_ms})
    assert (told.scale, told.idle_ms) == pytest.approx((scale, 0.0))


@pytest.mark.parametrize("tenths", [2, 16, 61, 297])
def test_a_step_that_is_busy_throughout_is_never_idle_for_less_than_nothing(tenths: int) -> None:
    told = breakdown(Plan((), (Cut({}),)), [at(tenths / 10, cast=tenths / 10)], tenths / 10.7, 1.0)
    assert told.idle_ms >= 0


@pytest.mark.parametrize(("shrinking_ms", "reliable"), [(1.0, True), (4.0, False)])
def test_a_family_that_would_be_negative_is_none(shrinking_ms: float, reliable: bool) -> None:
    told = breakdown(
        PLAN, [at(10.0 + shrinking_ms, cast=10.0, copy=shrinking_ms), at(26.0, cast=26.0)], 60.0, 1.0
    )
    assert told.families_ms.keys() == {"cast"}
    assert told.families_ms["cast"] == pytest.approx(told.busy_ms)
    assert told.reliable is reliable


def test_an_arm_with_more_tokens_is_told_for_those_of_the_step_as_it_is() -> None:
    told = breakdown(Plan((), (Cut({}),)), [at(100.0, 30, cast=100.0)], 60.0, 2.0)
    assert (told.families_ms, told.busy_ms, told.idle_ms, told.kernels) == ({"cast": 50.0}, 50.0, 10.0, 30)


def test_unknown_kernels_are_kept_however_short() -> None:
    groups = tuple(
        KernelGroup(name=str(number), family="unknown" if number in (3, 90) else "cast")
        for number in range(100)
    )
    told = breakdown(Plan((), (Cut({}),)), [at(1.0, groups=groups, cast=1.0)], 2.0, 1.0)
    assert [group.name for group in told.groups] == [*map(str, range(30)), "90"]


def test_a_step_that_the_line_puts_below_zero_has_no_reliable_parts() -> None:
    told = breakdown(PLAN, [at(10.0, cast=10.0), at(26.0, cast=26.0)], -1.0, 1.0)
    assert told.reliable is False
    assert sum(told.families_ms.values()) + told.idle_ms == pytest.approx(-1.0)


@given(st.lists(st.tuples(*[st.floats(0, 1e3)] * 3), min_size=2, max_size=2), st.floats(1e-3, 1e5))
def test_parts_always_add_up(cuts: list[tuple[float, ...]], step_ms: float) -> None:
    told = breakdown(
        PLAN, [at(sum(parts), cast=parts[0], copy=parts[1], norm=parts[2]) for parts in cuts], step_ms, 1.0
    )
    assert sum(told.families_ms.values()) + told.idle_ms == pytest.approx(step_ms)
    assert told.idle_ms >= 0
    assert all(part >= 0 for part in told.families_ms.values())
