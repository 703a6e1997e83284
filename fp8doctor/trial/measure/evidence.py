"""Prove that a variant ran as its name says: graphs, FP8 matmuls, executed blocks.

The profiler's raw events are counted (torch 2.11 and 2.13): its ``key_averages`` would take seconds.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fp8doctor.facts.scrub import scrub
from fp8doctor.facts.unrecorded import NOT_RECORDED
from fp8doctor.profiling.kernel_families import FP8_GEMM_KERNEL, FP8_OPERATORS
from fp8doctor.profiling.trace import Trace
from fp8doctor.stacks import torch_private
from fp8doctor.trial.copies.depth import cleaned

_log = logging.getLogger("fp8doctor")

COMPILED_REGION = "Torch-Compiled Region"

FORWARDS_OF_LINEARS = ("aten::linear", "matmul_with_hp_or_float8_args")
"""Names of the forward of an nn.Linear and a Float8Linear (torchao 0.10 to 0.18) in a profile. Inductor's
graphs hold neither."""

LIMIT_EXCEEDED = re.compile(r"(recompile|cache)(_size)?[ _]limit (exceeded|reached)", re.IGNORECASE)
"""Dynamo's failure of a frame that was compiled too often: ``Dynamo recompile limit exceeded`` (torch 2.13),
``recompile_limit reached`` (2.9), ``cache_size_limit reached`` (2.6)."""

PLACE = re.compile(r"\S+:\d+ in \S+$")
"""A guard's last comment, its place: ``model.py:12 in forward``."""

MOST_REASONS = 5
"""Most reasons of each kind to keep."""

SETTLE_S = 0.2
"""Seconds under load until a GPU's clocks settle (seen on an H200 at its power limit)."""


@dataclass(frozen=True)
class Compiled:
    """Frames that Dynamo compiled in this process so far, and graph breaks it met."""

    frames: int
    breaks: int


def compiled_so_far() -> Compiled | None:
    """Count what Dynamo compiled; None if this torch does not count it."""
    frames, breaks = torch_private.counters("frames"), torch_private.counters("graph_break")
    return None if frames is None or breaks is None else Compiled(frames.get("ok", 0), sum(breaks.values()))


@dataclass
class Compilations:
    """What Dynamo did while it was watched; not recorded if this torch hides it."""

    graphs: int = NOT_RECORDED
    breaks: int = NOT_RECORDED
    break_reasons: tuple[str, ...] = NOT_RECORDED
    recompilations: int = NOT_RECORDED
    recompile_reasons: tuple[str, ...] = NOT_RECORDED
    left_eager: tuple[str, ...] = NOT_RECORDED


@contextmanager
def compilations(model: nn.Module) -> Iterator[Compilations]:
    """Watch Dynamo, and fill the yielded record at the end.

    Functions of ``model`` are named with their class. Dynamo's own list of compilations holds the last 64: a
    longer one replaces it meanwhile.
    """
    torch_private.load_dynamo()
    seen, before, broken = Compilations(), compiled_so_far(), torch_private.counters("graph_break") or {}
    kept, log = torch_private.compilation_metrics(), deque[Any]()
    if kept is not None:
        torch_private.keep_metrics_in(log)
    try:
        yield seen
    finally:
        if kept is not None:
            torch_private.keep_metrics_in(kept)
        after = compiled_so_far()
        if before and after:
            seen.graphs, seen.breaks = after.frames - before.frames, after.breaks - before.breaks
            seen.break_reasons = _few(
                _break(reason)
                for reason, count in (torch_private.counters("graph_break") or {}).items()
                if count > broken.get(reason, 0)
            )
        if kept is not None and all(
            hasattr(each, "recompile_reason") for each in log
        ):  # which torch 2.6 lacks
            again = [each for each in log if each.recompile_reason]
            seen.recompilations = sum(not each.fail_type for each in again)
            seen.recompile_reasons = _few(_guard(each.recompile_reason) for each in again)
        if kept is not None and all(hasattr(each, "compile_id") for each in log):
            seen.left_eager = _left_eager(log, model)


def _few(reasons: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(map(scrub, reasons)))[:MOST_REASONS]


def _break(reason: str) -> str:
    """Name a graph break and explain it, without the hints and the user's source."""
    lines = [line.strip() for line in reason.strip().splitlines()]
    explained = next(
        (line.removeprefix("Explanation: ") for line in lines if line.startswith("Explanation: ")), ""
    )
    return f"{lines[0]}: {explained}" if explained else lines[0] if lines else ""


def _guard(reason: str) -> str:
    """Cut ``0/0: x == 1 # the line # file.py:1 in f`` to the guard and its place."""
    guard, *comments = re.split(r"\s+# ", reason.strip().partition("\n")[0])
    guard = re.sub(r"^\[?\d+/\d+\S*: ", "", guard)
    return f"{guard} ({comments[-1]})" if comments and PLACE.match(comments[-1]) else guard


def _left_eager(log: Iterable[Any], model: nn.Module) -> tuple[str, ...]:
    functions: dict[str, str] = {}
    owners = _forwards(model)
    abort_after = []
    for each in log:
        frame = str(each.compile_id).strip("[]").partition("/")[0]
        if each.co_name:
            functions.setdefault(frame, owners.get((each.co_filename, each.co_firstlineno), each.co_name))
        if LIMIT_EXCEEDED.search(each.fail_reason or ""):
            abort_after.append(
                functions.get(frame)
                or _guard(getattr(each, "recompile_reason", None) or "").rpartition(" in ")[2].rstrip(")")
                or f"frame {frame}"
            )
    return _few(abort_after)


def _forwards(model: nn.Module) -> Mapping[tuple[str, int], str]:
    """Map file and line of every ``forward`` of the model to its class and name."""
    codes = {type(module): getattr(type(module).forward, "__code__", None) for module in model.modules()}
    return {
        (code.co_filename, code.co_firstlineno): f"{kind.__qualname__}.forward"
        for kind, code in codes.items()
        if code is not None
    }


@dataclass(frozen=True)
class StepProof:
    """Counts of one profiled step."""

    fp8_gemms: int | None
    """None if they could not be counted."""
    graphs_run: int | None
    """None likewise."""
    uncompiled_linears: int | None = None
    """Forwards of a Linear outside of every compiled region; None if they were not counted."""


ANOTHER_PROFILER = "another profiler is active in this process, and to start a second one would end it"
OUTSIDE_THE_MAIN_THREAD = "torch's profiler works in the main thread only"
"""Elsewhere Kineto complains on stderr, and a process has ended in it (torch 2.13)."""


def proof_of(step: Callable[[], object], device: torch.device) -> StepProof:
    """Run one step and count; nothing is known if torch's profiler cannot be used here.

    A second profiler would end the user's without its events (torch 2.13). Raises what the step raises, such
    as the error of a GPU that is lost.
    """
    if why_not_profiled() is None:
        try:
            return counted(profiled(step, device).profiler, device)
        except Exception:
            _log.debug("profiling a step raises", exc_info=True)
            step()
    return StepProof(None, None)


def why_not_profiled() -> str | None:
    """Explain why torch's profiler cannot be used here; None if it can."""
    if torch_private.is_profiled():
        return ANOTHER_PROFILER
    return None if threading.current_thread() is threading.main_thread() else OUTSIDE_THE_MAIN_THREAD


def profiled(
    step: Callable[[], object], device: torch.device, *, to_read: bool = False
) -> torch.profiler.profile:
    """Run one step under the profiler, and stop it.

    ``to_read`` records the types of the operators' inputs. On CUDA it also keeps the GPU busy right up to the
    step: after a rest its clocks are higher than when the step was timed.
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    settle = (
        torch.profiler.schedule(wait=0, warmup=1, active=1, repeat=1)
        if to_read and device.type == "cuda"
        else None
    )
    profile = torch.profiler.profile(activities=activities, schedule=settle, record_shapes=to_read)
    with quiet_profiler(), profile:
        if settle:
            until = time.monotonic() + SETTLE_S
            while time.monotonic() < until:
                step()
                torch.cuda.synchronize(device)
            profile.step()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return profile


def counted(profile: torch.autograd.profiler.profile | None, device: torch.device) -> StepProof:
    """Count what a profiled step ran; FP8 matmuls on CUDA by their kernels."""
    operators = kernels = seen = 0
    regions: list[tuple[int, int]] = []
    linears: list[int] = []
    raw: Any = profile
    gpu = torch_private.gpu_events()
    for event in raw.kineto_results.events():
        name = event.name()
        operators += name in FP8_OPERATORS
        on_gpu = event.device_type() == gpu
        seen += on_gpu
        kernels += on_gpu and bool(FP8_GEMM_KERNEL.search(name))
        if name.startswith(COMPILED_REGION):
            regions.append((event.start_ns(), event.start_ns() + event.duration_ns()))
        elif name in FORWARDS_OF_LINEARS:
            linears.append(event.start_ns())
    outside = sum(not any(begin <= at < end for begin, end in regions) for at in linears)
    on_gpu = kernels if seen else operators or None  # without the GPU's events, none proves nothing
    return StepProof(operators if device.type != "cuda" else on_gpu, len(regions), outside)


def counted_in(trace: Trace, device: torch.device) -> StepProof:
    """Count the same in an exported trace, in 0.13 s instead of 1.2 (173,000 events)."""
    names = [event.name for events in trace.host.values() for event in events]
    regions = sum(name.startswith(COMPILED_REGION) for name in names)
    if device.type == "cuda":
        kernels = sum(bool(FP8_GEMM_KERNEL.search(event.name)) for event in trace.gpu)
        return StepProof(kernels if trace.gpu else None, regions)
    return StepProof(sum(name in FP8_OPERATORS for name in names), regions)


@contextmanager
def quiet_profiler() -> Iterator[None]:
    """Keep Kineto from writing to stderr; it reads the variable when it is first used."""
    before = os.environ.get("KINETO_LOG_LEVEL")
    os.environ["KINETO_LOG_LEVEL"] = "99"
    try:
        yield
    finally:
        if before is None:
            del os.environ["KINETO_LOG_LEVEL"]
        else:
            os.environ["KINETO_LOG_LEVEL"] = before


@dataclass
class Executed:
    """Names of the modules that ran in one step."""

    at_all: set[str] = field(default_factory=set)
    in_backward: set[str] = field(default_factory=set)
    """Modules that ran again while gradients were computed: checkpointing recomputes them."""

    def within(self, name: str) -> bool:
        return any(each == name or each.startswith(f"{name}.") for each in self.at_all)

    def recomputed(self) -> tuple[str, ...]:
        """Return the outermost modules that ran in the backward."""
        found: list[str] = []
        for name in sorted(self.in_backward):
            if not any(above in ("", name) or name.startswith(f"{above}.") for above in found):
                found.append(name)
        return tuple(found)


@contextmanager
def executed(model: nn.Module) -> Iterator[Executed]:
    """Note which modules of ``model`` run, and which of them in the backward."""
    seen = Executed()

    def note(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, arguments: object) -> None:
            seen.at_all.add(name)
            if torch_private.in_backward():
                seen.in_backward.add(name)

        return hook

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            hooks.callback(module.register_forward_pre_hook(note(cleaned(name))).remove)
        yield seen
