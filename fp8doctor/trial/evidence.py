"""Proof that an arm ran what its label says: graphs compiled, broken, compiled again and run, FP8 GEMMs, executed blocks.

Private names read here, verified on torch 2.11 and 2.13: ``torch._dynamo.utils.counters`` (``frames``,
``graph_break``), ``torch._dynamo.utils._compilation_metrics`` and the raw events of the profiler, whose ``key_averages``
would take seconds.
"""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._C._autograd import DeviceType

from fp8doctor.record import NOT_RECORDED
from fp8doctor.scrub import scrub

FP8_OPERATORS = frozenset({"aten::_scaled_mm", "aten::_scaled_mm_v2", "aten::_scaled_grouped_mm", "aten::_scaled_grouped_mm_v2"})

FP8_GEMM_KERNEL = re.compile(r"^nvjet_(sm\d+_)?[a-z]*q[a-z]*_|xmma_gemm_e[45]m[23]|cutlass.*(e4m3|e5m2)|float_e[45]m[23]|deep_gemm|fp8_gemm|f8f8bf16")
"""GEMM kernels with an FP8 operand: cuBLASLt's ``nvjet`` names e4m3 ``q`` (``qqtst``, ``qrtst``), seen on an H200 with
torchao 0.18 and TE 2.20.2; the others from public traces and sources."""

COMPILED_REGION = "Torch-Compiled Region"

LIMIT_EXCEEDED = re.compile(r"(recompile|cache) limit exceeded", re.IGNORECASE)
"""How Dynamo names the failure of a frame that was compiled too often: ``Dynamo recompile limit exceeded`` (torch 2.13)."""

PLACE = re.compile(r"\S+:\d+ in \S+$")
"""Where a guard came from, the last comment behind it: ``model.py:12 in forward``."""

MOST_REASONS = 5
"""Reasons that are kept of each kind."""


@dataclass(frozen=True)
class Compiled:
    """Frames that Dynamo compiled and graph breaks it met, since the process began."""

    frames: int
    breaks: int


def compiled_so_far() -> Compiled:
    from torch._dynamo.utils import counters

    return Compiled(counters["frames"].get("ok", 0), sum(counters["graph_break"].values()))


@dataclass
class Compilations:
    """What Dynamo did while it was watched; not recorded where this torch keeps it elsewhere."""

    graphs: int = NOT_RECORDED
    breaks: int = NOT_RECORDED
    break_reasons: tuple[str, ...] = NOT_RECORDED
    recompilations: int = NOT_RECORDED
    recompile_reasons: tuple[str, ...] = NOT_RECORDED
    left_eager: tuple[str, ...] = NOT_RECORDED


@contextmanager
def compilations(model: nn.Module) -> Iterator[Compilations]:
    """Watch Dynamo. The yielded record is filled at the end, functions of ``model`` named with their class in it.

    Dynamo's own list of compilations holds the last 64: a longer one takes its place meanwhile, and the user's comes back
    as it was.
    """
    from torch._dynamo import utils

    seen, before, broken = Compilations(), compiled_so_far(), dict(utils.counters["graph_break"])
    kept, log = getattr(utils, "_compilation_metrics", None), deque[Any]()
    if kept is not None:
        utils._compilation_metrics = log
    try:
        yield seen
    finally:
        if kept is not None:
            utils._compilation_metrics = kept
        after = compiled_so_far()
        seen.graphs, seen.breaks = after.frames - before.frames, after.breaks - before.breaks
        seen.break_reasons = _few(_break(reason) for reason, count in utils.counters["graph_break"].items() if count > broken.get(reason, 0))
        if kept is not None and all(hasattr(each, "recompile_reason") and hasattr(each, "compile_id") for each in log):
            again = [each for each in log if each.recompile_reason]
            seen.recompilations = sum(not each.fail_type for each in again)
            seen.recompile_reasons = _few(_guard(each.recompile_reason) for each in again)
            seen.left_eager = _left_eager(log, model)


def _few(reasons: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(map(scrub, reasons)))[:MOST_REASONS]


def _break(reason: str) -> str:
    """The name of a graph break and its explanation, without the hints and the user's source."""
    lines = [line.strip() for line in reason.strip().splitlines()]
    explained = next((line.removeprefix("Explanation: ") for line in lines if line.startswith("Explanation: ")), "")
    return f"{lines[0]}: {explained}" if explained else lines[0] if lines else ""


def _guard(reason: str) -> str:
    """The guard that failed and where it came from: ``0/0: x == 1   # the line  # file.py:1 in f`` without number and line."""
    guard, *comments = re.split(r"\s+# ", reason.strip().partition("\n")[0])
    guard = re.sub(r"^\[?\d+/\d+\S*: ", "", guard)
    return f"{guard} ({comments[-1]})" if comments and PLACE.match(comments[-1]) else guard


def _left_eager(log: Iterable[Any], model: nn.Module) -> tuple[str, ...]:
    """The functions that reached the limit: their last compilation failed, the ones before it say what they are called."""
    functions: dict[str, str] = {}
    owners = _forwards(model)
    given_up = []
    for each in log:
        frame = str(each.compile_id).strip("[]").partition("/")[0]
        if each.co_name:
            functions.setdefault(frame, owners.get((each.co_filename, each.co_firstlineno), each.co_name))
        if LIMIT_EXCEEDED.search(each.fail_reason or ""):
            given_up.append(functions.get(frame) or _guard(each.recompile_reason or "").rpartition(" in ")[2].rstrip(")") or f"frame {frame}")
    return _few(given_up)


def _forwards(model: nn.Module) -> Mapping[tuple[str, int], str]:
    """File and line of every ``forward`` of the model -> its class and name."""
    codes = {type(module): getattr(type(module).forward, "__code__", None) for module in model.modules()}
    return {(code.co_filename, code.co_firstlineno): f"{kind.__qualname__}.forward" for kind, code in codes.items() if code is not None}


@dataclass(frozen=True)
class StepProof:
    """What one profiled step ran."""

    fp8_gemms: int
    graphs_run: int


def prove(step: Callable[[], object], device: torch.device) -> StepProof:
    """Profile one step and count. On CUDA FP8 GEMMs are counted by kernel, which covers every stack."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with quiet_profiler(), torch.profiler.profile(activities=activities) as profile:
        step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    operators = kernels = regions = 0
    for event in profile.profiler.kineto_results.events():
        name = event.name()
        operators += name in FP8_OPERATORS
        kernels += event.device_type() == DeviceType.CUDA and bool(FP8_GEMM_KERNEL.search(name))
        regions += name.startswith(COMPILED_REGION)
    return StepProof(kernels if device.type == "cuda" else operators, regions)


@contextmanager
def quiet_profiler() -> Iterator[None]:
    """Keep the profiler's library from writing its own lines to stderr; it reads the variable when it is first used."""
    before = os.environ.get("KINETO_LOG_LEVEL")
    os.environ["KINETO_LOG_LEVEL"] = "99"
    try:
        yield
    finally:
        if before is None:
            del os.environ["KINETO_LOG_LEVEL"]
        else:
            os.environ["KINETO_LOG_LEVEL"] = before


@contextmanager
def executed(blocks: list[nn.Module]) -> Iterator[list[int]]:
    """Count forward calls of ``blocks``: the yielded list holds one number per block, in their order."""
    counts = [0] * len(blocks)

    def count(index: int) -> Callable[..., None]:
        def hook(module: nn.Module, arguments: object) -> None:
            counts[index] += 1

        return hook

    handles = [block.register_forward_pre_hook(count(index)) for index, block in enumerate(blocks)]
    try:
        yield counts
    finally:
        for handle in handles:
            handle.remove()
