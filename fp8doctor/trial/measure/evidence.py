"""Prove that a variant ran as its name says: graphs, FP8 matmuls, executed blocks, and what Dynamo did."""

import gc
import logging
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fp8doctor.examine.environment import variables_put_back
from fp8doctor.facts.scrub import scrub
from fp8doctor.files import own_folder
from fp8doctor.profiling.kernel_families import FP8_GEMM_KERNEL, FP8_OPERATORS
from fp8doctor.profiling.trace import Trace, read_trace
from fp8doctor.stacks import torch_private
from fp8doctor.stacks.torch_private import counters, frames_compiled

_log = logging.getLogger("fp8doctor")

COMPILED_REGION = "Torch-Compiled Region"

TEARDOWN = "TEARDOWN_CUPTI"
"""Variable that Kineto reads when a profile ends (``CuptiActivityApi.cpp``)."""

SETTLE_S = 0.2
"""Seconds under load until a GPU's clocks settle (seen on an H200 at its power limit)."""


@dataclass(frozen=True)
class StepProof:
    """Counts of one profiled step; None if it could not be profiled."""

    fp8_gemms: int | None = None
    """None also if the GPU's events were lost: then none proves nothing."""
    graphs_run: int | None = None


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
            return counted(profiled(step, device), device)
        except Exception:
            _log.debug("profiling a step raises", exc_info=True)
            step()
    return StepProof()


def why_not_profiled() -> str | None:
    """Explain why torch's profiler cannot be used here; None if it can."""
    if torch_private.is_profiled():
        return ANOTHER_PROFILER
    return None if threading.current_thread() is threading.main_thread() else OUTSIDE_THE_MAIN_THREAD


def profiled(step: Callable[[], object], device: torch.device, *, to_divide: bool = False) -> Trace:
    """Run one step under the profiler and read its trace.

    ``to_divide`` records the types of the operators' inputs. On CUDA it also keeps the GPU busy right up to
    the step: after a rest its clocks are higher than when the step was timed.
    """
    kinds, on_gpu = torch.profiler.ProfilerActivity, device.type == "cuda"
    activities = [kinds.CPU, kinds.CUDA] if on_gpu else [kinds.CPU]
    settles = torch.profiler.schedule(wait=0, warmup=1, active=1, repeat=1) if on_gpu and to_divide else None
    profile = torch.profiler.profile(activities=activities, schedule=settles, record_shapes=to_divide)
    with quiet_profiler(), profile:
        until = time.monotonic() + SETTLE_S
        while settles and time.monotonic() < until:
            step()
            torch.cuda.synchronize(device)
        if settles:
            profile.step()
        step()
        if on_gpu:
            torch.cuda.synchronize(device)
    return exported(profile)


def exported(profile: Any) -> Trace:
    """Read what a stopped profiler of torch recorded."""
    with own_folder() as folder:
        file = Path(folder, "step.json")
        profile.export_chrome_trace(str(file))
        return read_trace(file)


def counted(trace: Trace, device: torch.device) -> StepProof:
    """Count what a profiled step ran; FP8 matmuls on CUDA by their kernels."""
    events = [event for thread in trace.host.values() for event in thread]
    if device.type == "cuda":
        kernels = sum(bool(FP8_GEMM_KERNEL.search(each.name)) for each in trace.gpu)
        gemms = kernels if trace.gpu else None
    else:
        gemms = sum(each.name in FP8_OPERATORS for each in events)
    return StepProof(gemms, sum(each.name.startswith(COMPILED_REGION) for each in events))


@contextmanager
def quiet_profiler() -> Iterator[None]:
    """Keep Kineto from writing to stderr; it reads the variable when it is first used."""
    with variables_put_back():
        os.environ["KINETO_LOG_LEVEL"] = "99"
        yield


@contextmanager
def detaching() -> Iterator[None]:
    """Detach CUPTI when the profiler stops.

    Kineto leaves it attached, which slows every later launch: steps of 35 ms took 25% longer (H100, torch
    2.11). torch keeps it attached with CUDA graphs, because a later profile could crash.
    """
    graphs = torch_private.may_hold_cuda_graphs() or any(
        type(each) is torch.cuda.CUDAGraph for each in gc.get_objects()
    )
    if TEARDOWN in os.environ or graphs:
        yield
        return
    os.environ[TEARDOWN] = "1"
    try:
        yield
    finally:
        os.environ.pop(TEARDOWN, None)


@contextmanager
def detached_at_the_end(device: torch.device) -> Iterator[None]:
    """Leave no CUPTI attached by profiles inside: one more, of nothing, detaches it in 10 ms.

    A launch took 9.3 us attached and 7.3 after it (H200, torch 2.11).
    """
    try:
        yield
    finally:
        if device.type == "cuda" and why_not_profiled() is None:
            nothing = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            with suppress(RuntimeError), quiet_profiler(), detaching(), nothing:
                pass


@contextmanager
def on_calls(
    modules: Iterable[nn.Module],
    enter: Callable[[nn.Module, Any], None],
    leave: Callable[[nn.Module], None] = lambda module: None,
) -> Iterator[None]:
    """Report every call of the modules, with its arguments and keywords, and its end.

    The end is reported of a call that raises too: checkpointing ends a recomputation that way.
    """
    with ExitStack() as hooks:
        for module in modules:
            entering = module.register_forward_pre_hook(
                lambda module, *given: enter(module, given), prepend=True, with_kwargs=True
            )
            leaving = module.register_forward_hook(lambda module, *_: leave(module), always_call=True)
            hooks.callback(entering.remove)
            hooks.callback(leaving.remove)
        yield


LIMIT_EXCEEDED = re.compile(r"(recompile|cache)(_size)?[ _]limit (exceeded|reached)", re.IGNORECASE)
"""Dynamo's failure of a frame that was compiled too often: ``Dynamo recompile limit exceeded`` (torch 2.13),
``recompile_limit reached`` (2.9), ``cache_size_limit reached`` (2.6)."""

PLACE = re.compile(r"\S+:\d+ in \S+$")
"""A guard's last comment, its place: ``model.py:12 in forward``."""

MOST_REASONS = 5
"""Most reasons of each kind to keep."""


Compilations = dict[str, Any]
"""Fields of `ArmCut` by name, and ``graphs``, how many were compiled; without what this torch hides."""


@contextmanager
def compilations(model: nn.Module) -> Iterator[Compilations]:
    """Watch Dynamo, and fill the yielded record at the end.

    Functions of ``model`` are named with their class. Dynamo's own list of compilations holds the last 64: a
    longer one replaces it meanwhile.
    """
    torch_private.load_dynamo()
    seen, frames, broken = Compilations(), frames_compiled(), counters("graph_break") or {}
    kept, log = torch_private.compilation_metrics(), deque[Any]()
    if kept is not None:
        torch_private.keep_metrics_in(log)
    try:
        yield seen
    finally:
        if kept is not None:
            torch_private.keep_metrics_in(kept)
        breaks = counters("graph_break")
        if breaks is not None:
            more = {each: count - broken.get(each, 0) for each, count in breaks.items()}
            seen.update(graphs=frames_compiled() - frames, graph_breaks=sum(more.values()))
            seen["break_reasons"] = _few(_break(reason) for reason, count in more.items() if count)
        if kept is not None and all(hasattr(each, "recompile_reason") for each in log):  # torch 2.6 has none
            again = [each for each in log if each.recompile_reason]
            seen["recompilations"] = sum(not each.fail_type for each in again)
            seen["recompile_reasons"] = _few(_guard(each.recompile_reason) for each in again)
        if kept is not None and all(hasattr(each, "compile_id") for each in log):
            seen["left_eager"] = _left_eager(log, model)


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
    """Name the functions whose limit was exceeded; a forward of the model with its class."""
    forwards = {
        (code.co_filename, code.co_firstlineno): f"{type(module).__qualname__}.forward"
        for module in model.modules()
        if (code := getattr(type(module).forward, "__code__", None)) is not None
    }
    functions: dict[str, str] = {}
    left = []
    for each in log:
        frame = str(each.compile_id).strip("[]").partition("/")[0]
        if each.co_name:
            functions.setdefault(frame, forwards.get((each.co_filename, each.co_firstlineno), each.co_name))
        if LIMIT_EXCEEDED.search(each.fail_reason or ""):
            left.append(
                functions.get(frame)
                or _guard(getattr(each, "recompile_reason", None) or "").rpartition(" in ")[2].rstrip(")")
                or f"frame {frame}"
            )
    return _few(left)
