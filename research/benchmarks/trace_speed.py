"""How long a trace takes to read and split: ``python research/benchmarks/trace_speed.py [TRACE] [--kernels N]
[--hta PYTHON] [--tracelens PYTHON]``.

TRACE is a file of ``torch.profiler.profile(...).export_chrome_trace``. Without one a trace of N GPU events is
composed, with the categories, keys, nesting and spacing of an exported step of eager torchao FP8 with
``record_shapes``, and is called composed in the result. PYTHON is an interpreter that has
HolisticTraceAnalysis, or TraceLens, which then read the same file, in turn. Prints Markdown; exits with 1
when a bound is missed: 1 s for 50,000 GPU events, a tenth of HolisticTraceAnalysis' time. Both are held to
seconds of the processor: on a machine that others use, wall time measures the others. The row of ``fp8doctor
trace`` also tells steps apart and idle time by its cause, as that command does.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from tabulate import tabulate

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fp8doctor.profiling.profiled_step import step_of
from fp8doctor.profiling.trace import read_trace
from fp8doctor.profiling.users_trace import traced_step
from research.benchmarks.machine import machine

BOUND_US = 1e6 / 50_000
"""For each GPU event."""

BOUND_RATIO = 10
RUNS = 5

HTA = """
import contextlib, importlib.metadata, io, json, logging, os, sys, time
logging.disable(logging.CRITICAL)
from hta.trace_analysis import TraceAnalysis
def now():
    return sum(os.times()[:4]), time.perf_counter()
with contextlib.redirect_stdout(io.StringIO()):
    marks = [now()]
    analysis = TraceAnalysis(trace_files={0: sys.argv[1]})
    marks.append(now())
    analysis.get_gpu_kernel_breakdown(visualize=False, duration_ratio=1.0)
    analysis.get_idle_time_breakdown(visualize=False)
    marks.append(now())
installed = {each.name for each in importlib.metadata.distributions()}
names = [name for name in ("HolisticTraceAnalysis", "traceinsight", "pandas", "numpy") if name in installed]
print(json.dumps({"marks": marks, "versions": {name: importlib.metadata.version(name) for name in names}}))
"""
"""From 0.6 on HolisticTraceAnalysis is called traceinsight."""

TRACELENS = """
import contextlib, importlib.metadata, io, json, logging, os, sys, time
logging.disable(logging.CRITICAL)
from TraceLens import TreePerfAnalyzer
def now():
    return sum(os.times()[:4]), time.perf_counter()
with contextlib.redirect_stdout(io.StringIO()):
    marks = [now()]
    analysis = TreePerfAnalyzer.from_file(sys.argv[1])
    marks.append(now())
    analysis.get_df_kernel_launchers_summary_by_category(analysis.get_df_kernel_launchers())
    analysis.get_df_gpu_timeline()
    marks.append(now())
installed = {each.name for each in importlib.metadata.distributions()}
names = [name for name in ("TraceLens", "orjson") if name in installed]
print(json.dumps({"marks": marks, "versions": {name: importlib.metadata.version(name) for name in names}}))
"""

ELEMENTWISE = (
    "void at::native::vectorized_elementwise_kernel<{}, at::native::{}, std::array<char*, {}ul> >(int, "
    "at::native::{}, std::array<char*, {}ul>)"
)
ABS = ELEMENTWISE.format(8, "AbsFunctor<c10::BFloat16>", 2, "AbsFunctor<c10::BFloat16>", 2)
AMAX = (
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<c10::BFloat16, "
    "at::native::func_wrapper_t<c10::BFloat16, "
    "at::native::MaxNanFunctor<c10::BFloat16> >, unsigned int, c10::BFloat16, 4, 4> >"
)
COPY = (
    "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda"
    "(at::TensorIteratorBase&)::{lambda()#3}>"
)
CLAMP = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::(anonymous "
    "namespace)::launch_clamp_scalar(at::TensorIteratorBase&, c10::Scalar)>"
)
SCALE = (
    "void at::native::elementwise_kernel<128, 2, "
    "at::native::gpu_kernel_impl_nocast<at::native::BinaryFunctor<float, float, float> > >"
)
TO_FP8 = (
    "void at::native::vectorized_elementwise_kernel<4, "
    "at::native::float8_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda(float)#1}>"
)
GEMM = "nvjet_sm90_qqtst_256x128_128x4_1x2_h_bz_coopA_TNT"

Node = tuple[str, list["Node"]] | str
"""An operator and what it calls, or the kernel that it launches."""

VIEW: list[Node] = [("aten::t", [("aten::transpose", [("aten::as_strided", [])])])]
SHAPE: list[Node] = [("aten::reshape", [("aten::view", [("PythonSubclass", [("aten::view", [])])])])]
COPIED: list[Node] = [("aten::_to_copy", [("aten::empty_strided", []), ("aten::copy_", [COPY])])]
CLONED: list[Node] = [
    (
        "aten::clone",
        [("aten::empty_like", [("aten::empty", [])]), ("aten::copy_", [COPY, ("aten::empty", [])])],
    )
]
CLAMPED: list[Node] = [("aten::to", []), CLAMP]


def cast(before_max: list[Node]) -> list[Node]:
    return [
        ("aten::abs", [("aten::empty", []), ("aten::abs", [ABS, ("aten::as_strided_", [])])]),
        ("aten::max", [("aten::empty", []), *before_max, ("aten::fill_", []), AMAX]),
        ("aten::to", COPIED),
        ("aten::clamp", CLAMPED),
        ("aten::reciprocal", [SCALE]),
        ("aten::mul", [SCALE]),
        ("aten::to", COPIED),
        (
            "_ToFloat8ConstrFunc",
            [
                ("aten::to", COPIED),
                ("aten::mul", [SCALE]),
                ("aten::clamp", CLAMPED),
                ("aten::to", [("aten::_to_copy", [("aten::empty_strided", []), ("aten::copy_", [TO_FP8])])]),
            ],
        ),
    ]


PRODUCT: list[Node] = [
    *SHAPE,
    (
        "aten::mm",
        [
            (
                "PythonSubclass",
                [
                    ("aten::reciprocal", [SCALE]),
                    ("aten::reciprocal", [SCALE]),
                    ("aten::_scaled_mm", [("aten::empty", []), GEMM]),
                ],
            )
        ],
    ),
    *SHAPE,
]
NODE = "matmul_with_hp_or_float8_args"
LAYER: list[Node] = [
    *VIEW,
    (NODE, [*cast([]), *cast([("aten::contiguous", CLONED)]), *PRODUCT]),
    (
        f"autograd::engine::evaluate_function: {NODE}Backward",
        [(f"{NODE}Backward", [*SHAPE, *2 * [*cast([]), *cast([]), *VIEW, *PRODUCT, *VIEW]])],
    ),
    ("autograd::engine::evaluate_function: TBackward0", [("TBackward0", VIEW)]),
    (
        "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad",
        [("torch::autograd::AccumulateGrad", [("aten::new_empty_strided", [])])],
    ),
]
"""The calls of one Float8Linear, forward and backward, as torch 2.13 and torchao 0.18 make them."""


@dataclass
class Composer:
    """Writes events as kineto lays them out; the GPU runs half a millisecond behind the host."""

    kernels: int
    events: list[str] = field(default_factory=list)
    now: float = 1000.0
    gpu: float = 1500.0
    identity: int = 1
    launched: int = 0

    def event(
        self, category: str, name: str, start: float, duration: float, row: str, arguments: str
    ) -> None:
        self.events.append(
            f'  {{\n    "ph": "X", "cat": "{category}", "name": "{name}", {row},\n    "ts": '
            f'{start:.3f}, "dur": {duration:.3f},\n'
            f'    "args": {{\n      {arguments}\n    }}\n  }}'
        )

    def node(self, node: Node, operator: int) -> None:
        if isinstance(node, str):
            self.kernel(node, operator)
            return
        name, calls = node
        self.identity += 1
        identity, start, place = self.identity, self.now, len(self.events)
        self.now += 1.0
        for call in calls:
            self.node(call, identity)
        self.now += 1.0
        arguments = (
            f'"External id": {identity},"Sequence number": {identity}, "Fwd thread id": 0, "Record '
            'function id": 0, "Concrete Inputs": ["", ""], '
            '"Input type": ["c10::BFloat16", "Scalar"], "Input Strides": [[4096, 1], []], "Input Dims": '
            "[[8192, 4096], []], "
            f'"Ev Idx": {identity}'
        )
        self.event("cpu_op", name, start, self.now - start, '"pid": 4242, "tid": 4242', arguments)
        self.events.insert(place, self.events.pop())

    def kernel(self, name: str, operator: int) -> None:
        self.launched += 1
        correlation, host, device = self.launched + 90_000, '"pid": 4242, "tid": 4242', '"pid": 0, "tid": 7'
        self.event(
            "cuda_runtime",
            "cudaLaunchKernel",
            self.now,
            3.5,
            host,
            f'"External id": {operator}, "cbid": 211, "correlation": {correlation}',
        )
        start, duration = max(self.gpu, self.now + 4.0), 5.0 + self.launched % 37
        self.event(
            "kernel",
            name,
            start,
            duration,
            device,
            f'"External id": {operator}, "queued": 0, "device": 0, "context": 1, "stream": 7, '
            f'"correlation": {correlation}, "registers per thread": 32, '
            '"shared memory": 0, "blocks per SM": 62.06, "warps per SM": 248.24, "grid": [8192, 1, 1], '
            '"block": [128, 1, 1], "est. achieved occupancy %": 100',
        )
        flow = f'"id": {correlation}, "cat": "ac2g", "name": "ac2g"'
        self.events.append(f'  {{\n    "ph": "s", {flow}, {host}, "ts": {self.now:.3f}\n  }}')
        self.events.append(f'  {{\n    "ph": "f", {flow}, {device}, "ts": {start:.3f}, "bp": "e"\n  }}')
        self.gpu, self.now = start + duration + 0.9, self.now + 4.0

    def text(self) -> Iterator[str]:
        while self.launched < self.kernels:
            for node in LAYER:
                self.node(node, 0)
        yield '{\n  "schemaVersion": 1,\n  "deviceProperties": [],\n  "displayTimeUnit": "ms",'
        yield '\n  "baseTimeNanoseconds": 1790857026000000000,\n  "traceEvents": [\n'
        yield ",\n".join(self.events)
        yield '\n  ],\n  "traceName": "composed"\n}\n'


Marks = list[tuple[float, float]]
"""Seconds of the processor and of the clock: before, between reading and splitting, after."""


def now() -> tuple[float, float]:
    return time.process_time(), time.perf_counter()


def ours(path: Path) -> tuple[Marks, int]:
    """Read and split; also how many GPU events."""
    marks = [now()]
    trace = read_trace(path)
    marks.append(now())
    kernels = step_of(trace).kernels
    marks.append(now())
    return marks, kernels


def as_the_command_does(path: Path) -> Marks:
    """The same for ``fp8doctor trace``; what it reads and splits is one call."""
    before = now()
    traced_step(path)
    return [before, before, now()]


def theirs(path: Path, python: str, script: str) -> tuple[Marks, dict[str, str]]:
    """The same of another tool, its children's processor included; also the versions."""
    done = subprocess.run(
        [python, "-c", script, str(path)], check=True, capture_output=True, text=True, timeout=3600
    )
    answer = json.loads(done.stdout.splitlines()[-1])
    return answer["marks"], answer["versions"]


def row(name: str, runs: list[Marks]) -> tuple[str | float, ...]:
    read, split = ([run[step + 1][0] - run[step][0] for run in runs] for step in (0, 1))
    both = [run[2][0] - run[0][0] for run in runs]
    wall = [run[2][1] - run[0][1] for run in runs]
    return (name, *map(statistics.median, (read, split, both)), min(both), max(both), statistics.median(wall))


def main() -> int:
    """Time both on one file; 1 when a bound is missed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("trace", nargs="?", type=Path)
    parser.add_argument("--kernels", type=int, default=50_000)
    parser.add_argument("--hta")
    parser.add_argument("--tracelens")
    options = parser.parse_args()
    tools = {"HolisticTraceAnalysis": (options.hta, HTA), "TraceLens": (options.tracelens, TRACELENS)}
    mine: list[Marks] = []
    command: list[Marks] = []
    others: dict[str, list[Marks]] = {name: [] for name, (python, _) in tools.items() if python}
    versions: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        path, origin = options.trace, "recorded"
        if path is None:
            path, origin = Path(folder) / "composed.json", "composed"
            path.write_text("".join(Composer(options.kernels).text()))
        for _ in range(RUNS):
            marks, kernels = ours(path)
            mine.append(marks)
            command.append(as_the_command_does(path))
            for name, runs in others.items():
                marks, found = theirs(path, *tools[name])
                versions |= found
                runs.append(marks)
        size = f"{path.stat().st_size / 1e6:.0f} MB"
    rows = [row("fp8doctor", mine), row("fp8doctor trace", command)]
    rows += [row(name, runs) for name, runs in others.items()]
    print(
        " · ".join(
            (
                f"{datetime.now(UTC):%Y-%m-%d}",
                machine(("msgspec",)),
                *(f"{name} {version}" for name, version in versions.items()),
            )
        )
    )
    print(
        f"\nOne {origin} step: {kernels:,} GPU events, {size}. Seconds of the processor, median, least "
        f"and most of {RUNS} runs in turn; load {load()}.\n"
    )
    print(
        tabulate(
            rows,
            ("", "read", "split", "both", "least", "most", "wall, median"),
            floatfmt=".2f",
            tablefmt="github",
        )
    )
    took, bound = rows[1][3], kernels * BOUND_US / 1e6
    faster = {str(name): each / took for name, _, _, each, *_ in rows[2:]}
    told = "".join(f" {ratio:.1f} times as fast as {name}." for name, ratio in faster.items())
    print(f"\nBound {bound:.2f} s: {'held' if took <= bound else 'missed'} by fp8doctor trace.{told}")
    return int(took > bound or faster.get("HolisticTraceAnalysis", BOUND_RATIO) < BOUND_RATIO)


def load() -> str:
    """Processes that want a core, where the system tells."""
    return f"{os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "unknown"


if __name__ == "__main__":
    sys.exit(main())
