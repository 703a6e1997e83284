"""Splitting a profiled step: real traces of torch.profiler on the CPU, and composed ones for what only a GPU
does."""

import gzip
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint
from torchao.float8 import convert_to_float8_training

from fp8doctor.facts.record import UnreadableDocument
from fp8doctor.profiling.profiled_step import ProfiledStep, step_of
from fp8doctor.profiling.trace import read_trace
from fp8doctor.trial.measure.evidence import quiet_profiler
from tests.profiling.composed import Composed

FP8 = "nvjet_sm90_qqtst_256x128_128x4_1x2_h_bz_coopA_TNT"
BF16 = "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT"
NCCL = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL"


def traced(step: Callable[[], object], folder: Path) -> Path:
    """A real trace of one step on this machine's CPU."""
    path = folder / "trace.json"
    with quiet_profiler(), profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        step()
    profiler.export_chrome_trace(str(path))
    return path


def training_step(model: nn.Module, width: int = 32) -> Callable[[], object]:
    batch = torch.randn(16, width, dtype=torch.bfloat16, requires_grad=True)
    return lambda: model(batch).float().pow(2).mean().backward()


def split(step: Callable[[], object], folder: Path) -> ProfiledStep:
    step()
    return step_of(read_trace(traced(step, folder)))


def bf16(*modules: nn.Module) -> nn.Module:
    return nn.Sequential(*modules).bfloat16()


def linear() -> nn.Linear:
    return nn.Linear(32, 32, bias=False)


# Real traces.


def test_eager_fp8_model(tmp_path: Path) -> None:
    model = bf16(convert_to_float8_training(nn.Sequential(linear(), nn.SiLU(), linear())))
    step = split(training_step(model), tmp_path)
    groups = {(group.name, group.family): group for group in step.groups}
    assert groups["aten::_scaled_mm", "gemm_fp8"].count == 6
    assert groups["aten::abs", "cast"].count == 2 * 6, "aten::abs calls aten::abs with its result"
    assert [name for name, family in groups if family == "gemm_fp8"] == ["aten::_scaled_mm"], (
        "with all that a CPU does in its place"
    )
    assert not {family for _, family in groups} & {"unknown", "gemm_16bit", "gemm_fp32"}
    assert step.families_ms.keys() == {"cast", "gemm_fp8", "pointwise"}
    assert step.host_wait_pct is None
    assert_adds_up(step)


class InFp32(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(input.float(), self.weight.float()).to(input.dtype)


class MathAttention(nn.Module):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        heads = input.view(1, 4, 4, 32)
        with sdpa_kernel([SDPBackend.MATH]):
            return functional.scaled_dot_product_attention(heads, heads, heads).reshape(16, 32) + input


def test_backward_serves_what_its_forward_served(tmp_path: Path) -> None:
    """GEMMs of torch's attention are attention, those of the Linears beside it are not."""
    step = split(training_step(bf16(linear(), MathAttention(), linear())), tmp_path)
    gemms = {
        (group.name, group.family): group.count
        for group in step.groups
        if group.name in ("aten::bmm", "aten::mm")
    }
    assert gemms == {("aten::bmm", "attention"): 6, ("aten::mm", "gemm_16bit"): 6}


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = checkpoint(self.inner, input, use_reentrant=self.reentrant)
        return result


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recomputed_forward_is_counted(reentrant: bool, tmp_path: Path) -> None:
    step = split(training_step(bf16(linear(), Checkpointed(InFp32(32, 32), reentrant))), tmp_path)
    [matmul] = [group for group in step.groups if group.family == "gemm_fp32"]
    assert matmul.count == 4


# Composed traces: what kineto writes of a GPU.


def test_compute_owns_before_communication_before_copy(tmp_path: Path) -> None:
    trace = Composed()
    trace.kernel(BF16, 100, 200)
    trace.kernel(NCCL, 150, 300, stream=20)
    trace.kernel("Memcpy DtoH (Device -> Pinned)", 50, 400, stream=21, category="gpu_memcpy")
    trace.kernel(FP8, 180, 250, stream=22)
    step = trace.read(tmp_path)
    assert step.families_ms == pytest.approx(
        {"copy": 0.15, "gemm_16bit": 0.1, "gemm_fp8": 0.05, "communication": 0.05}
    )
    assert step.busy_ms == pytest.approx(0.35)
    assert step.host_wait_pct is None
    assert step.kernels == 4
    assert_adds_up(step)


@pytest.mark.parametrize(
    ("launches", "waited"), [((150, 240), 0.0), ((150, 260), 75.0), ((205, 260), 100.0), ((205, 240), 25.0)]
)
def test_gap_is_the_hosts_when_the_launch_came_after_the_gpu_ran_dry(
    launches: tuple[float, float], waited: float, tmp_path: Path
) -> None:
    trace = Composed()
    trace.kernel(BF16, 100, 200, launched=0)
    trace.kernel(BF16, 210, 250, launched=launches[0])
    trace.kernel(BF16, 220, 230, launched=0, stream=20)
    trace.kernel(BF16, 280, 300, launched=launches[1])
    assert trace.read(tmp_path).host_wait_pct == pytest.approx(waited)


@pytest.mark.parametrize("linked", [True, False], ids=["links", "no links"])
def test_backward_on_the_thread_of_autograd(linked: bool, tmp_path: Path) -> None:
    """The forward of thread 10 and a recomputation of thread 11 count the same sequence numbers; the links
    say whose a node is."""
    trace = Composed()
    trace.operator("aten::scaled_dot_product_attention", 0, 20, 8)
    trace.operator("aten::mm", 5, 10, 1, **{"Sequence number": 7, "Fwd thread id": 0})
    trace.operator("aten::detach", 12, 13, 2, **{"Sequence number": 8, "Fwd thread id": 0})
    trace.operator("aten::mm", 25, 30, 3, **{"Sequence number": 8, "Fwd thread id": 0})
    trace.operator(
        "autograd::engine::evaluate_function: MmBackward0",
        50,
        60,
        4,
        thread=11,
        **{"Sequence number": 8, "Fwd thread id": 1},
    )
    trace.operator("aten::mm", 63, 65, 5, thread=11, **{"Sequence number": 7, "Fwd thread id": 0})
    trace.operator(
        "autograd::engine::evaluate_function: MmBackward0",
        80,
        90,
        6,
        thread=11,
        **{"Sequence number": 7, "Fwd thread id": 1},
    )
    trace.operator("aten::mm", 82, 84, 7, thread=11)
    for index, operator in enumerate((1, 3, 4, 5, 7)):
        trace.kernel(BF16, 100 + 10 * index, 110 + 10 * index, operator=operator)
    if linked:
        ends = {"pid": 1, "cat": "fwdbwd", "name": "fwdbwd", "id": 1}
        trace.events += [
            {"ph": "s", "tid": 10, "ts": 25, **ends},
            {"ph": "f", "tid": 11, "ts": 50, "bp": "e", **ends},
        ]
    times = trace.read(tmp_path).families_ms
    attention = 0.02 if linked else 0.01
    assert times == pytest.approx({"attention": attention, "gemm_16bit": 0.05 - attention})


def assert_adds_up(step: ProfiledStep) -> None:
    assert sum(step.families_ms.values()) == pytest.approx(step.busy_ms)
    assert sum(group.time_ms for group in step.groups) == pytest.approx(step.busy_ms)
    assert sum(group.count for group in step.groups) == step.kernels


# What is no trace.


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b'{"traceEvents": [{"ph": "X", "dur": NaN}]}',
        b"[" * 100_000,
        b"[1, 2]",
        b'{"traceEvents": [{"ts": "soon"}]}',
        gzip.compress(b'{"traceEvents": []}', mtime=0)[:-9],
        b'{"traceEvents": []}',
        b'{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "aten::empty", "ts": 1, "dur": 2}]}',
    ],
)
def test_what_is_no_trace_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(content)
    with pytest.raises(UnreadableDocument):
        step_of(read_trace(path))
