"""Time the parts of a training step on this GPU by shape: ``python research/benchmarks/gemm_sweep.py
OUT.json``

Needs torch and torchao alone, one GPU, and under 4 minutes; ``--tiny`` runs every line on a CPU in seconds
and its times mean nothing. Writes one JSON: GEMMs in BF16 and FP8 over tokens, widths, LoRA's ranks, heads
and sides that fit no tile, in the three layouts of training; torchao's casts, compiled and eager; optimizer,
attention, norm, loss, bandwidth; what modules take of the host. `calibrate_cost.py` reads it.

``--only grid`` times layers of real models instead, by recipe and rows, and splits their kernels into matmuls
and the rest: compiled MLPs in BF16 and by torchao, and Linears and MLPs of Transformer Engine if it is
installed. What an FP8 layer takes beside its matmuls, less what the same layer takes in BF16, are its casts.

Times are of the GPU: CUDA events around many calls, captured as a graph where a call is shorter than its
launch. Operands rotate through memory larger than the L2. Large GEMMs run before every measurement, while the
host prepares it, so that the clocks are those of a GPU at work; what is not measured within ``--seconds`` is
counted in ``left_out``. A measurement that fails is named in ``failures`` and costs nothing else;
``not_captured`` counts short calls that could not be captured, whose times hold the host's launches.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

Call = Callable[[int], object]

HEAT_MS, WINDOW_MS = 20.0, 15.0
"""GEMMs before a measurement, and its length; a call longer than a third of it is made three times."""

SHORT_MS = 0.1
"""A call that is expected to be shorter is captured as a graph."""

SHARES = {"clocks": 0.05, "gemms": 0.60, "parts": 0.12, "casts": 0.23}
"""Of the seconds, in this order; what one group leaves goes to the next."""

GRID_ROWS = (8192, 2048, 512, 16384, 4096)
GRID_SIDES = ((4096, 14336), (1024, 4096), (8192, 28672), (2048, 8192), (5120, 13824))
"""Width and MLP of Llama 8B, of a GPT of 350M, of Llama 70B and 1B, and of Qwen 14B."""

WARM = 7
"""Processes that compile the grid's layers, so that the caches on disk serve the one that times them."""

STEPS_PROFILED = 4

FP8_MATMUL = re.compile(
    r"nvjet_(sm\d+_)?[a-z]*q[a-z]*_|gemm_e[45]m[23]|cutlass.*e[45]m[23]|float_e[45]m[23]|f8f8"
)
MATMUL = re.compile(r"nvjet|gemm|cutlass|splitKreduce", re.IGNORECASE)
"""Kernels, by name; what is neither is a cast, a norm or an activation."""


def kind_of(kernel: str) -> str:
    """Tell matmuls from the rest; Triton's kernels are named after a matmul that they cast for."""
    if kernel.startswith("triton_"):
        return "rest"
    return "fp8" if FP8_MATMUL.search(kernel) else "16bit" if MATMUL.search(kernel) else "rest"


TOKENS = (8192, 16384, 4096, 2048, 1024)

WIDTHS = (
    *((width, width) for width in (512, 1024, 2048, 4096, 8192, 16384)),
    *(
        (1024, 4096),
        (4096, 1024),
        (2048, 8192),
        (8192, 2048),
        (4096, 14336),
        (14336, 4096),
        (8192, 28672),
        (28672, 8192),
    ),
    *((1536, 6144), (6144, 1536), (4096, 11008), (11008, 4096), (5120, 13824)),
    *((2048, 512), (8192, 1024)),
    *((1040, 1040), (2064, 2064), (4112, 4112), (3000, 3000)),
    *((1024, 32000), (4096, 32000), (1024, 50257), (2048, 128256), (4096, 128256)),
    *itertools.chain.from_iterable(
        ((width, rank), (rank, width)) for width in (2048, 4096) for rank in (8, 16, 32, 64)
    ),
)
"""(in, out): squares, MLPs, keys of grouped queries, sides that 256 does not divide, heads, LoRA's pairs."""

ROLES = ("output", "input_gradient", "weight_gradient")


class Timer:
    """Times calls on one device."""

    def __init__(self, device: str, tiny: bool) -> None:
        self.device, self.tiny = device, tiny
        self.cuda = device == "cuda"
        self.not_captured: dict[str, int] = {}
        if self.cuda:
            self.side, self.graph = torch.cuda.Stream(), None
            side = torch.randn(8192, 8192, device=device).bfloat16()
            self.hot = (side, side.clone(), torch.empty_like(side))
            self.heat_calls = 1
            torch.mm(*self.hot[:2], out=self.hot[2])
            self.heat_calls = max(
                1, round(HEAT_MS / self.loop(lambda _: torch.mm(*self.hot[:2], out=self.hot[2]), 1, 20))
            )

    def heat(self) -> None:
        for _ in range(self.heat_calls):
            torch.mm(*self.hot[:2], out=self.hot[2])

    def ms(self, call: Call, copies: int = 1, expected_ms: float = 1.0) -> float:
        """Time of one ``call(i)`` for i of 0 to ``copies`` - 1 in turn."""
        calls = 2 if self.tiny else max(3, min(512, round(WINDOW_MS / max(expected_ms, 0.005))))
        if not self.cuda:
            began = time.perf_counter()
            for index in range(calls):
                call(index % copies)
            return (time.perf_counter() - began) * 1e3 / calls
        self.heat()
        call(0)
        if expected_ms < SHORT_MS:
            try:
                return self.replay(call, copies, calls)
            except RuntimeError as error:
                why = f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"
                self.not_captured[why] = self.not_captured.get(why, 0) + 1
                torch.cuda.synchronize()
                torch.cuda.default_generators[0].graphsafe_set_state(
                    torch.Generator("cuda").graphsafe_get_state()
                )  # the old one takes itself for captured
        return self.loop(call, copies, calls)

    def loop(self, call: Call, copies: int, calls: int) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for index in range(calls):
            call(index % copies)
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / calls

    def replay(self, call: Call, copies: int, calls: int) -> float:
        graph = torch.cuda.CUDAGraph()
        pool = (
            (self.graph.pool(),) if self.graph else ()
        )  # that of the graph before, which is alive until this one is captured
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            call(0)
            graph.capture_begin(*pool, capture_error_mode="thread_local")
            try:
                for index in range(calls):
                    call(index % copies)
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(self.side)
        self.graph = graph
        self.heat()
        graph.replay()
        return self.loop(lambda _: graph.replay(), 1, 2) / calls

    def loop_hot(self, call: Call, expected_ms: float) -> float:
        """Time of one call after large GEMMs, its launches included."""
        calls = 2 if self.tiny else max(3, min(50, round(WINDOW_MS / max(expected_ms, 0.1))))
        if not self.cuda:
            return self.ms(call)
        self.heat()
        return self.loop(call, 1, calls)

    def kernels(self, call: Call) -> tuple[float | None, float | None, float | None, int | None]:
        """Kernel time of one call: FP8 matmuls, other matmuls, the rest, and how many kernels the rest is."""
        if not self.cuda:
            return None, None, None, None
        from torch.autograd import DeviceType
        from torch.profiler import ProfilerActivity, profile

        self.heat()
        self.wait()
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            for index in range(STEPS_PROFILED):
                call(index)
            self.wait()
        times, others = {"fp8": 0.0, "16bit": 0.0, "rest": 0.0}, 0
        for each in profiled.key_averages():
            if each.device_type == DeviceType.CUDA:
                kind = kind_of(each.key)
                times[kind] += each.self_device_time_total / 1e3 / STEPS_PROFILED
                others += each.count if kind == "rest" else 0
        return times["fp8"], times["16bit"], times["rest"], round(others / STEPS_PROFILED)

    def host_ms(self, call: Call) -> float:
        """Wall time of one call where the host is what limits it."""
        calls = 2 if self.tiny else 30
        for index in range(calls):
            call(index)
        self.wait()
        began = time.perf_counter()
        for index in range(calls):
            call(index)
        self.wait()
        return (time.perf_counter() - began) * 1e3 / calls

    def wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()


class Operands:
    """Matrices of random values cut out of one piece of memory per dtype, each copy elsewhere."""

    def __init__(self, device: str, elements: int) -> None:
        self.memory: dict[torch.dtype, torch.Tensor] = {}
        self.elements, self.device = elements, device
        self.rotate_bytes = 2 * torch.cuda.get_device_properties(0).L2_cache_size if device == "cuda" else 1
        for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2):
            whole = torch.empty(elements, dtype=dtype, device=device)
            for part in whole.split(1 << 26):
                part.copy_(torch.randn(part.numel(), device=device))
            self.memory[dtype] = whole

    def matrices(
        self, rows: int, columns: int, dtype: torch.dtype, copies: int, shift: int = 0
    ) -> list[torch.Tensor]:
        """``copies`` matrices that overlap only when the memory is used up; ``shift`` keeps two operands
        apart."""
        size = rows * columns
        step = -(-size // 256) * 256
        room = max(1, (self.elements - size) // 256 + 1) * 256
        offsets = ((shift + index * step) % room // 256 * 256 for index in range(copies))
        return [
            self.memory[dtype][offset : offset + size].view(rows, columns)
            for offset in (min(each, self.elements - size) for each in offsets)
        ]

    def copies(self, bytes_each: int) -> int:
        return max(1, min(32, -(-self.rotate_bytes // bytes_each)))


class Sweep:
    """The measurements and what became of them."""

    def __init__(self, device: str, seconds: float, tiny: bool, only: str = "") -> None:
        self.began, self.seconds, self.tiny, self.device = time.monotonic(), seconds, tiny, device
        self.warms = False
        self.timer = Timer(device, tiny)
        self.shares = {only: 1.0} if only else SHARES
        self.operands = Operands(device, 1 << 20 if tiny or only == "grid" else 16384 * 128256 + (1 << 20))
        self.rows: dict[str, list[list[Any]]] = {group: [] for group in (*self.shares, "host")}
        self.left_out = dict.fromkeys(self.shares, 0)
        self.failures: list[str] = []

    def run(self) -> None:
        due = 0.0
        for group, share in self.shares.items():
            due += share * self.seconds
            for name, measure in getattr(self, group)():
                if time.monotonic() - self.began > due and not self.tiny:
                    self.left_out[group] += 1
                    continue
                try:
                    measure()
                except Exception as error:
                    self.failures.append(
                        f"{group} {name}: {type(error).__name__}: "
                        f"{str(error).splitlines()[0][:160] if str(error) else ''}"
                    )

    def add(self, group: str, *row: Any) -> None:
        self.rows[group].append([round(value, 6) if isinstance(value, float) else value for value in row])

    def clocks(self) -> Iterator[tuple[str, Callable[[], None]]]:
        """A large GEMM after a rest and after seconds of itself."""
        m, k, n = (64, 32, 48) if self.tiny else (16384, 4096, 16384)
        for kind in ("bf16", "fp8"):

            def measure(kind: str = kind) -> None:
                call, copies = self.gemm(kind, "output", m, k, n)
                call(0)
                self.timer.wait()
                if not self.tiny:
                    time.sleep(1.0)
                burst = self.plain(call, copies, 10)
                rest, began = burst, time.monotonic()
                while time.monotonic() - began < (0.0 if self.tiny else 1.5):
                    rest = self.plain(call, copies, 40)
                self.add("clocks", kind, m, k, n, burst, rest, *state())

            yield kind, measure

    def plain(self, call: Call, copies: int, calls: int) -> float:
        return self.timer.loop(call, copies, calls) if self.timer.cuda else self.timer.ms(call, copies)

    def gemms(self) -> Iterator[tuple[str, Callable[[], None]]]:
        """Every shape; all of one number of tokens before the next, so that what is left out is known."""
        tokens, widths = ((64,), ((32, 48), (48, 16), (40, 33))) if self.tiny else (TOKENS, WIDTHS)
        for m, (k, n) in itertools.product(tokens, widths):
            for kind, role in (*itertools.product(("bf16", "fp8"), ROLES), ("fp8_rowwise", "output")):
                if kind != "bf16" and (k % 16 or n % 16):
                    continue

                def measure(kind: str = kind, role: str = role, m: int = m, k: int = k, n: int = n) -> None:
                    call, copies = self.gemm(kind, role, m, k, n)
                    peak = 0.7e12 if kind == "bf16" else 1.3e12
                    expected = 1e3 * max(2 * m * k * n / (peak * 1e3), 2 * (m * k + k * n + m * n) / 4e12)
                    self.add("gemms", kind, role, m, k, n, self.timer.ms(call, copies, expected))

                yield f"{kind} {role} {(m, k, n)}", measure

    def gemm(self, kind: str, role: str, m: int, k: int, n: int) -> tuple[Call, int]:
        """One GEMM of a Linear with ``m`` tokens, as training lays it out, and how many copies of its
        operands there are."""
        a, b = {
            "output": ((m, k), (n, k)),
            "input_gradient": ((m, n), (k, n)),
            "weight_gradient": ((n, m), (k, m)),
        }[role]
        bytes_each = (1 if kind != "bf16" else 2) * (a[0] * a[1] + b[0] * b[1])
        copies = self.operands.copies(bytes_each)
        shift = copies * a[0] * a[1]
        if kind == "bf16":
            if role == "output":
                left, right = (
                    self.operands.matrices(*a, torch.bfloat16, copies),
                    [w.t() for w in self.operands.matrices(n, k, torch.bfloat16, copies, shift)],
                )
            elif role == "input_gradient":
                left, right = (
                    self.operands.matrices(*a, torch.bfloat16, copies),
                    self.operands.matrices(n, k, torch.bfloat16, copies, shift),
                )
            else:
                left = [g.t() for g in self.operands.matrices(m, n, torch.bfloat16, copies)]
                right = self.operands.matrices(m, k, torch.bfloat16, copies, shift)
            return (lambda index: torch.mm(left[index], right[index])), copies
        gradient = role != "output"
        left = self.operands.matrices(*a, torch.float8_e5m2 if gradient else torch.float8_e4m3fn, copies)
        right = [each.t() for each in self.operands.matrices(*b, torch.float8_e4m3fn, copies, shift)]
        rowwise = kind == "fp8_rowwise"
        one = torch.ones((), device=self.device)
        scales = (
            (torch.ones(a[0], 1, device=self.device), torch.ones(1, b[0], device=self.device))
            if rowwise
            else (one, one)
        )

        def scaled(index: int) -> torch.Tensor:
            return torch._scaled_mm(
                left[index], right[index], *scales, out_dtype=torch.bfloat16, use_fast_accum=not gradient
            )

        return scaled, copies

    def parts(self) -> Iterator[tuple[str, Callable[[], None]]]:
        """Bandwidth, launches, optimizer, attention, norm, loss, and the host's time of modules."""
        device, timer = self.device, self.timer

        def bandwidth() -> None:
            for elements in (1 << 10,) if self.tiny else (1 << 24, 1 << 26, 1 << 28):
                source = torch.randn(elements, device=device).bfloat16()
                target = torch.empty_like(source)
                self.add(
                    "parts",
                    "copy",
                    elements,
                    timer.ms(lambda _, to=target, of=source: to.copy_(of), 1, 4 * elements / 4e9),
                )

        def launch() -> None:
            one = torch.ones(1, device=device)
            self.add("parts", "launch", 1, timer.ms(lambda _: one.add_(1), 1, 0.002))

        def adamw(dtype: torch.dtype) -> None:
            weights = [
                nn.Parameter(torch.randn(1 << (8 if self.tiny else 24), device=device, dtype=dtype))
                for _ in range(16)
            ]
            for weight in weights:
                weight.grad = torch.randn_like(weight)
            optimizer = torch.optim.AdamW(weights, lr=1e-5, fused=True)
            optimizer.step()
            elements = sum(weight.numel() for weight in weights)
            self.add("parts", f"adamw {dtype}", elements, timer.ms(lambda _: optimizer.step(), 1, 2.0))

        def attention(batch: int, heads: int, length: int, width: int, causal: bool) -> None:
            q, k, v = (
                torch.randn(batch, heads, length, width, device=device).bfloat16().requires_grad_()
                for _ in range(3)
            )
            gradient = torch.randn_like(q)

            def both(_: int) -> None:
                functional.scaled_dot_product_attention(q, k, v, is_causal=causal).backward(gradient)
                q.grad = k.grad = v.grad = None

            def forward(_: int) -> None:
                with torch.no_grad():
                    functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

            self.add(
                "parts",
                "attention",
                batch,
                heads,
                length,
                width,
                causal,
                timer.ms(forward, 1, 0.3),
                timer.ms(both, 1, 1.0),
            )

        def norm(rows: int, width: int) -> None:
            x, weight = (
                torch.randn(rows, width, device=device).bfloat16().requires_grad_(),
                torch.ones(width, device=device, dtype=torch.bfloat16),
            )
            gradient = torch.randn_like(x)

            def both(_: int) -> None:
                functional.rms_norm(x, (width,), weight).backward(gradient)
                x.grad = None

            self.add("parts", "rms_norm", rows * width, timer.ms(both, 1, 0.3))

        def swiglu(rows: int, width: int) -> None:
            gate, up = (torch.randn(rows, width, device=device).bfloat16().requires_grad_() for _ in range(2))
            gradient = torch.randn_like(gate)

            def both(_: int) -> None:
                (functional.silu(gate) * up).backward(gradient)
                gate.grad = up.grad = None

            self.add("parts", "swiglu", rows * width, timer.ms(both, 1, 0.5))

        def loss(rows: int, vocabulary: int, upcast: bool) -> None:
            logits = torch.randn(rows, vocabulary, device=device, dtype=torch.bfloat16).requires_grad_()
            target = torch.randint(0, vocabulary, (rows,), device=device)

            def both(_: int) -> None:
                functional.cross_entropy(logits.float() if upcast else logits, target).backward()
                logits.grad = None

            self.add(
                "parts", "loss fp32" if upcast else "loss 16bit", rows * vocabulary, timer.ms(both, 1, 3.0)
            )

        def host(name: str, width: int, tokens: int) -> None:
            layer: nn.Module = nn.Linear(width, width, bias=False, device=device, dtype=torch.bfloat16)
            if name.startswith("float8"):
                layer = float8(layer, "tensorwise")
            if name.endswith("compiled"):
                layer.compile(backend="eager" if self.tiny else "inductor", dynamic=False)
            x, gradient = (
                torch.randn(tokens, width, device=device).bfloat16().requires_grad_(),
                torch.randn(tokens, width, device=device).bfloat16(),
            )
            self.add("host", name, tokens, width, timer.host_ms(lambda _: step(layer, x, gradient)))

        yield "copy", bandwidth
        yield "launch", launch
        yield "adamw bf16", lambda: adamw(torch.bfloat16)
        yield "adamw fp32", lambda: adamw(torch.float32)
        sizes = (
            ((1, 2, 16, 8),)
            if self.tiny
            else (
                (16, 16, 1024, 64),
                (4, 32, 2048, 128),
                (4, 32, 2048, 64),
                (1, 32, 8192, 128),
                (1, 32, 8192, 64),
            )
        )
        for each in sizes:
            yield f"attention {each}", lambda each=each: attention(*each, True)
        yield (
            "attention, all of it",
            lambda: attention(*(sizes[0] if self.tiny else (64, 16, 256, 64)), False),
        )
        for rows, width in ((8, 16),) if self.tiny else ((16384, 1024), (8192, 4096)):
            yield "norm", lambda rows=rows, width=width: norm(rows, width)
            yield "swiglu", lambda rows=rows, width=width: swiglu(rows, 4 * width)
        for vocabulary, upcast in itertools.product((32,) if self.tiny else (32000, 128256), (False, True)):
            yield (
                f"loss {vocabulary}",
                lambda vocabulary=vocabulary, upcast=upcast: loss(
                    16 if self.tiny else 8192, vocabulary, upcast
                ),
            )
        for name in ("linear", "float8", "float8 compiled"):
            yield f"host {name}", lambda name=name: host(name, *((32, 16) if self.tiny else (2048, 256)))

    def casts(self) -> Iterator[tuple[str, Callable[[], None]]]:
        """torchao's casts of one tensor, by recipe: those of a forward and of a backward apart, as compiled
        graphs are."""
        sizes = ((32, 48),) if self.tiny else ((16384, 1024), (8192, 4096), (4096, 14336))
        for rows, columns in sizes:

            def rescale(rows: int = rows, columns: int = columns) -> None:
                copies = self.operands.copies(2 * rows * columns)
                tensors = self.operands.matrices(rows, columns, torch.bfloat16, copies)
                scales = torch.ones(rows, 1, device=self.device), torch.ones(1, columns, device=self.device)
                torch._dynamo.reset()
                run = torch.compile(
                    lambda x: x.mul_(scales[0] * scales[1]),
                    dynamic=False,
                    backend="eager" if self.tiny else "inductor",
                )
                time_ms = self.timer.ms(lambda index: run(tensors[index]), copies, rows * columns * 4 / 4e9)
                self.add(
                    "casts",
                    "rowwise",
                    "rescale of a gradient",
                    "backward",
                    "compiled",
                    rows,
                    columns,
                    time_ms,
                )

            yield "rescale", rescale
            for (recipe, role, direction), casts in CASTS.items():
                for compiled in (True, False):

                    def measure(
                        rows: int = rows,
                        columns: int = columns,
                        recipe: str = recipe,
                        role: str = role,
                        direction: str = direction,
                        casts: tuple[Cast, ...] = casts,
                        compiled: bool = compiled,
                    ) -> None:
                        copies = self.operands.copies(2 * rows * columns)
                        tensors = self.operands.matrices(rows, columns, torch.bfloat16, copies)

                        def run(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
                            return tuple(cast(x, *each) for each in casts)

                        if compiled:
                            torch._dynamo.reset()
                            run = torch.compile(
                                run, dynamic=False, backend="eager" if self.tiny else "inductor"
                            )
                        expected = rows * columns * (8 if compiled else 60) / 4e9
                        time_ms = self.timer.ms(lambda index: run(tensors[index]), copies, expected)
                        self.add(
                            "casts",
                            recipe,
                            role,
                            direction,
                            "compiled" if compiled else "eager",
                            rows,
                            columns,
                            time_ms,
                        )

                    yield f"{recipe} {role} {direction}", measure

    def grid(self) -> Iterator[tuple[str, Callable[[], None]]]:
        """Layers of real models, forward and backward: the first rows at every width before the next rows."""
        rows, sides = ((32,), ((32, 64),)) if self.tiny else (GRID_ROWS, GRID_SIDES)
        try:
            import transformer_engine.pytorch  # noqa: F401
        except Exception as error:
            self.failures.append(f"no Transformer Engine: {type(error).__name__}: {error}"[:160])
        has_te = "transformer_engine.pytorch" in sys.modules
        for m, (k, n) in itertools.product(rows, sides):
            for module, recipe in (*GRID, *(TE_GRID if has_te and not self.warms else ())):
                yield (
                    f"{module} {recipe} {(m, k, n)}",
                    lambda m=m, k=k, n=n, module=module, recipe=recipe: self.layer(module, recipe, m, k, n),
                )

    def layer(self, module: str, recipe: str, m: int, k: int, n: int) -> None:
        torch._dynamo.reset()
        around: Around = nullcontext
        if module == "torch mlp":
            with torch.device(self.device):
                layer: nn.Module = Mlp(k, n).to(torch.bfloat16)
            if recipe != "bf16":
                layer = float8(layer, recipe)
            layer.compile(dynamic=False, backend="eager" if self.tiny else "inductor")
        else:
            layer, around = transformer_engine(module, recipe, k, n, self.device)
        x = torch.randn(m, k, device=self.device).bfloat16().requires_grad_()
        gradient = torch.randn(m, n if module == "te linear" else k, device=self.device).bfloat16()

        def run(_: int) -> None:
            step(layer, x, gradient, around)

        for _ in range(1 if self.warms else 2):
            run(0)
        if self.warms:
            return
        products = 3 if module.endswith("mlp") else 1
        ms = self.timer.loop_hot(run, 6e3 * products * m * k * n / 1e15)
        self.add("grid", module, recipe, m, k, n, ms, *self.timer.kernels(run))

    def result(self) -> dict[str, Any]:
        return {
            "what": "one measurement per row, times in ms",
            "gpu": torch.cuda.get_device_name() if self.timer.cuda else "none",
            "multiprocessors": torch.cuda.get_device_properties(0).multi_processor_count
            if self.timer.cuda
            else None,
            "l2_bytes": torch.cuda.get_device_properties(0).L2_cache_size if self.timer.cuda else None,
            "versions": {name: version(name) for name in ("torch", "torchao", "transformer_engine")}
            | {"python": platform.python_version(), "cuda": torch.version.cuda},
            "date": datetime.now(UTC).date().isoformat(),
            "seconds": round(time.monotonic() - self.began, 1),
            "fields": FIELDS,
            **self.rows,
            "left_out": self.left_out,
            "not_captured": self.timer.not_captured,
            "failures": self.failures,
        }


FIELDS = {
    "clocks": ["kind", "m", "k", "n", "burst_ms", "sustained_ms", "sm_clock_mhz", "power_w"],
    "gemms": ["kind", "role", "tokens", "in", "out", "ms"],
    "parts": "name, its sizes, ms; attention: batch, heads, length, width of a head, causal, forward "
    "ms, forward "
    "and backward ms",
    "casts": ["recipe", "role", "direction", "mode", "rows", "columns", "ms"],
    "grid": [
        "module",
        "recipe",
        "rows",
        "width",
        "width of the MLP, or outputs",
        "forward and backward ms",
        "kernels of FP8 matmuls ms",
        "of other matmuls ms",
        "all other kernels ms",
        "how many they are",
    ],
    "host": ["module", "tokens", "width", "forward and backward ms"],
}

Cast = tuple[torch.dtype, int | None, bool]
"""Float8 dtype; the axis along which a scale is shared, None for one scale; whether the copy is
transposed."""

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

CASTS: dict[tuple[str, str, str], tuple[Cast, ...]] = {
    ("tensorwise", "input", "forward"): ((E4M3, None, False),),
    ("tensorwise", "input", "backward"): ((E4M3, None, True),),
    ("tensorwise", "weight", "forward"): ((E4M3, None, False),),
    ("tensorwise", "weight", "backward"): ((E4M3, None, True),),
    ("tensorwise", "gradient", "backward"): ((E5M2, None, False), (E5M2, None, True)),
    ("rowwise", "input", "forward"): ((E4M3, -1, False),),
    ("rowwise", "input", "backward"): ((E4M3, 0, True),),
    ("rowwise", "weight", "forward"): ((E4M3, -1, False),),
    ("rowwise", "weight", "backward"): ((E4M3, 0, True),),
    ("rowwise", "gradient", "backward"): ((E4M3, -1, False), (E4M3, 0, True)),
    ("rowwise_with_gw_hp", "input", "forward"): ((E4M3, -1, False),),
    ("rowwise_with_gw_hp", "weight", "forward"): ((E4M3, -1, False),),
    ("rowwise_with_gw_hp", "weight", "backward"): ((E4M3, None, True),),
    ("rowwise_with_gw_hp", "gradient", "backward"): ((E4M3, -1, False),),
}
"""What ``matmul_with_hp_or_float8_args`` of torchao 0.18 casts, with the layouts that its GEMMs ask for.
Rowwise gradients are scaled after their GEMM, too (``addmm_float8_unwrapped``)."""


def cast(x: torch.Tensor, dtype: torch.dtype, axis: int | None, transposed: bool) -> torch.Tensor:
    """One cast as torchao makes it."""
    from torchao.float8.config import ScalingGranularity
    from torchao.float8.float8_utils import tensor_to_scale, to_fp8_saturated

    granularity = ScalingGranularity.TENSORWISE if axis is None else ScalingGranularity.AXISWISE
    scale = tensor_to_scale(x, dtype, False, None, granularity, axis, axis is not None)
    data = to_fp8_saturated(x.to(torch.float32) * scale, dtype)
    return data.t().contiguous() if transposed else data


def float8(layer: nn.Module, recipe: str) -> nn.Module:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    return convert_to_float8_training(layer, config=Float8LinearConfig.from_recipe_name(recipe))


class Mlp(nn.Module):
    """The second half of a decoder's block, whose norm and activation a compiler fuses with casts."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        return x + self.down(functional.silu(self.gate(normed)) * self.up(normed))


GRID = tuple(itertools.product(("torch mlp",), ("bf16", "tensorwise", "rowwise", "rowwise_with_gw_hp")))
TE_GRID = tuple(itertools.product(("te linear", "te mlp"), ("bf16", "delayed", "current", "blockwise")))
"""Module and recipe. "te mlp" is a ``LayerNormMLP``, whose norm and activation write FP8 themselves."""

TE_RECIPES = {
    "delayed": "DelayedScaling",
    "current": "Float8CurrentScaling",
    "blockwise": "Float8BlockScaling",
}

Around = Callable[[], AbstractContextManager[object]]


def transformer_engine(module: str, recipe: str, k: int, n: int, device: str) -> tuple[nn.Module, Around]:
    """Build a layer of Transformer Engine, and the context that it runs in."""
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe as recipes

    common = {"bias": False, "params_dtype": torch.bfloat16, "device": device}
    if module == "te mlp":
        layer = te.LayerNormMLP(k, n, normalization="RMSNorm", activation="swiglu", **common)
    else:
        layer = te.Linear(k, n, **common)
    scaling = getattr(recipes, TE_RECIPES[recipe])() if recipe != "bf16" else None
    autocast = getattr(te, "autocast", None)
    if autocast is None:
        return layer, lambda: te.fp8_autocast(enabled=scaling is not None, fp8_recipe=scaling)
    return layer, lambda: autocast(enabled=scaling is not None, recipe=scaling)


def step(layer: nn.Module, x: torch.Tensor, gradient: torch.Tensor, around: Around = nullcontext) -> None:
    """Forward and backward; gradients are dropped."""
    with around():
        y = layer(x)
    y.backward(gradient)
    x.grad = None
    layer.zero_grad(set_to_none=True)


def version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def state() -> tuple[float | None, float | None]:
    """Clock in MHz and power in W, where NVML's Python package is there."""
    try:
        return float(torch.cuda.clock_rate()), torch.cuda.power_draw() / 1e3
    except Exception:
        return None, None


def warm(seconds: float, more: list[str]) -> None:
    """Compile the grid in `WARM` processes at once, for so many seconds at the most."""
    command = [sys.executable, __file__, os.devnull, "--only", "grid", "--seconds", str(seconds), *more]
    threads = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "2"}
    workers = [subprocess.Popen([*command, "--warm", str(index)], env=threads) for index in range(WARM)]
    for worker in workers:
        worker.wait()


def compile_part(sweep: Sweep, index: int) -> None:
    """Compile every `WARM`-th layer of the grid until the time is over."""
    for number, (_, measure) in enumerate(sweep.grid()):
        if time.monotonic() - sweep.began > sweep.seconds:
            return
        if number % WARM == index:
            with suppress(Exception):  # that which times it says why
                measure()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=215.0)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--only", choices=(*SHARES, "grid"), default="")
    parser.add_argument("--warm", type=int, help="of `warm`, which starts itself with it")
    arguments = parser.parse_args()
    if not arguments.tiny and not torch.cuda.is_available():
        print("no GPU; --tiny only shows that the code runs", file=sys.stderr)
        return 1
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if arguments.warm is None and arguments.only == "grid":
        warm(arguments.seconds / 2, ["--tiny"] if arguments.tiny else [])
    sweep = Sweep(device, arguments.seconds, arguments.tiny, arguments.only)
    if arguments.warm is not None:
        sweep.warms = True
        compile_part(sweep, arguments.warm)
        return 0
    sweep.run()
    result = sweep.result()
    lines = ",\n".join(
        f'"{key}": '
        + (
            "[\n" + ",\n".join(json.dumps(row) for row in value) + "\n]"
            if key in sweep.rows and value
            else json.dumps(value)
        )
        for key, value in result.items()
    )
    arguments.out.write_text("{\n" + lines + "\n}\n")
    counts = ", ".join(f"{len(rows)} {group}" for group, rows in sweep.rows.items())
    print(
        f"{result['gpu']}: {counts} in {result['seconds']} s; left out "
        f"{sweep.left_out}; "
        f"{len(sweep.failures)} failed"
    )
    for failure in sweep.failures[:20]:
        print(f"  {failure}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
