"""Traces that a user's own profiler wrote: steps, idle time and its cause, what is left out."""

import gzip
import json
from itertools import pairwise
from pathlib import Path

import pytest

from fp8doctor.facts.record import UnreadableDocument
from fp8doctor.facts.trial import TracedStep
from fp8doctor.profiling import trace as reader
from fp8doctor.profiling.users_trace import traced_step
from tests.profiling.composed import Composed

FP8 = "nvjet_sm90_qqtst_256x128_128x4_1x2_h_bz_coopA_TNT"
BF16 = "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT"
LOADER = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"


def read(trace: Composed, folder: Path) -> TracedStep:
    return traced_step(trace.write(folder))


def steps(trace: Composed, *bounds: float, name: str = "ProfilerStep#") -> None:
    for number, (start, end) in enumerate(pairwise(bounds)):
        trace.add("user_annotation", f"{name}{number}", start, end, 10)


def adds_up(step: TracedStep) -> None:
    assert sum(step.families_ms.values()) == pytest.approx(step.busy_ms)
    assert sum(kernel.time_ms for kernel in step.kernels) == pytest.approx(step.busy_ms)
    assert step.busy_ms + step.gpu_idle_ms == pytest.approx(step.step_ms)
    assert step.low_ms - 1e-9 <= step.step_ms <= step.high_ms + 1e-9


def test_times_are_the_mean_of_the_profilers_steps(tmp_path: Path) -> None:
    """The GPU runs behind the host: a step lasts until it is done with what the step launched."""
    trace = Composed()
    steps(trace, 0, 100, 200)
    trace.kernel(FP8, 10, 150, launched=5)
    trace.kernel(BF16, 150, 180, launched=90)
    trace.kernel(FP8, 180, 380, launched=110)
    step = read(trace, tmp_path)
    assert (step.steps, step.marked_by, step.outside_ms) == (2, "profiler", 0.0)
    assert (step.low_ms, step.step_ms, step.high_ms) == pytest.approx((0.18, 0.19, 0.2))
    assert step.families_ms == pytest.approx({"gemm_fp8": 0.17, "gemm_16bit": 0.015})
    assert [(kernel.name, kernel.count) for kernel in step.kernels] == [(FP8, 1.0), (BF16, 0.5)]
    assert step.idle_ms == pytest.approx({"late_launch": 0.005})
    adds_up(step)


def test_work_outside_the_steps_is_left_out(tmp_path: Path) -> None:
    trace = Composed()
    steps(trace, 100, 200)
    trace.kernel(BF16, 50, 120, launched=40)
    trace.kernel(FP8, 130, 190, launched=125)
    trace.kernel(BF16, 260, 300, launched=250)
    step = read(trace, tmp_path)
    assert step.families_ms == pytest.approx({"gemm_fp8": 0.06})
    assert step.outside_ms == pytest.approx(0.11)
    assert step.step_ms == pytest.approx(0.08), "the GPU was free for it from 120 on"
    adds_up(step)


def test_without_the_profilers_marks_the_optimizer_ends_steps(tmp_path: Path) -> None:
    trace = Composed()
    for number in range(3):
        begin = 100 * number
        trace.operator("aten::mm", begin, begin + 10, number + 1)
        trace.kernel(FP8, begin + 5, begin + 60, launched=begin + 2)
        trace.add("user_annotation", "Optimizer.step#AdamW.step", begin + 80, begin + 90, 10)
    step = read(trace, tmp_path)
    assert (step.steps, step.marked_by) == (3, "optimizer")
    assert step.step_ms == pytest.approx((290 - 5) / 3 / 1e3)
    adds_up(step)


def test_without_any_marks_the_times_are_of_the_whole(tmp_path: Path) -> None:
    trace = Composed()
    trace.kernel(FP8, 100, 160, launched=90)
    trace.kernel(FP8, 200, 260, launched=110)
    step = read(trace, tmp_path)
    assert (step.steps, step.marked_by) == (0, None)
    assert (step.step_ms, step.busy_ms) == pytest.approx((0.16, 0.12))
    assert step.idle_ms == pytest.approx({"in_time": 0.04})
    adds_up(step)


@pytest.mark.parametrize(
    ("host", "cause"),
    [
        (("user_annotation", LOADER, 205, 295), "data_loader"),
        (("cuda_runtime", "cudaMemcpyAsync", 205, 295), "host_copy"),
        (("cpu_op", "_compile.compile_inner (dynamo_timed)", 205, 295), "compilation"),
        (("cuda_runtime", "cudaStreamSynchronize", 150, 205), "synchronization"),
        (("cpu_op", "aten::mm", 205, 295), "late_launch"),
    ],
)
def test_idle_time_is_told_by_what_the_host_did(
    host: tuple[str, str, float, float], cause: str, tmp_path: Path
) -> None:
    trace = Composed()
    trace.kernel(FP8, 100, 200, launched=90)
    category, name, start, end = host
    trace.add(category, name, start, end, 10, **{"External id": 7, "correlation": 999})
    trace.kernel(FP8, 300, 400, launched=295)
    step = read(trace, tmp_path)
    longest = max(step.idle_ms.items(), key=lambda item: item[1])
    assert longest[0] == cause
    assert longest[1] >= 0.09
    adds_up(step)


@pytest.mark.parametrize("calm", [True, False])
def test_steps_that_compile_are_left_out_where_others_do_not(calm: bool, tmp_path: Path) -> None:
    trace = Composed()
    steps(trace, 0, 1000, *((1100,) if calm else ()))
    trace.operator("compile_attempt_0 (dynamo_timed)", 10, 900, 1)
    trace.kernel(FP8, 950, 990, launched=940)
    if calm:
        trace.kernel(FP8, 1020, 1090, launched=1010)
    step = read(trace, tmp_path)
    assert (step.steps, step.compiling_steps, step.compiled) == (1, 1, not calm)
    assert step.step_ms == pytest.approx(0.1 if calm else 1.0)
    assert ("compilation" in step.idle_ms) is not calm
    adds_up(step)


def test_the_busiest_of_several_gpus_is_told(tmp_path: Path) -> None:
    trace = Composed()
    trace.kernel(BF16, 100, 150)
    trace.add("kernel", FP8, 100, 300, 7, device=1)
    devices = [{"id": 0, "name": "NVIDIA H100"}, {"id": 1, "name": "NVIDIA H200"}]
    job = {"rank": 3, "world_size": 8}
    step = traced_step(trace.write(tmp_path, deviceProperties=devices, distributedInfo=job))
    assert (step.gpu, step.gpus, step.rank, step.world_size) == ("NVIDIA H200", 2, 3, 8)
    assert step.families_ms == pytest.approx({"gemm_fp8": 0.2})


def events(*categories: str) -> bytes:
    """A trace of one event for each of these categories."""
    told = [
        {"ph": "X", "ts": 1, "dur": 2, "tid": 1, "cat": each, "name": "any", "args": {"correlation": 5}}
        for each in categories
    ]
    return json.dumps({"traceEvents": told}).encode()


WHOLE = events("kernel", "cpu_op", "kernel")


@pytest.mark.parametrize(
    "content",
    [
        b"SQLite format 3\x00",
        b'{"schema_version": 1, "facts": {}}',
        events("cpu_op", "cuda_runtime"),
        *(WHOLE[:end] for end in range(0, len(WHOLE), 29)),
        *(gzip.compress(WHOLE, mtime=0)[:end] for end in range(0, 80, 29)),
    ],
)
def test_what_holds_no_work_of_a_gpu_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(content)
    with pytest.raises(UnreadableDocument):
        traced_step(path)


@pytest.mark.parametrize("compressed", [True, False])
def test_a_huge_trace_is_refused(compressed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = Composed()
    for start in range(100):
        trace.kernel("nvjet_sm90_qqtst", start, start + 1)
    path = trace.write(tmp_path)
    if compressed:
        path.write_bytes(gzip.compress(path.read_bytes()))
    monkeypatch.setattr(reader, "LARGEST_TRACE", 5000)
    with pytest.raises(UnreadableDocument, match="record fewer steps"):
        traced_step(path)
