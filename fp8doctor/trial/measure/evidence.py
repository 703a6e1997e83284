"""Prove that a variant ran as its name says: graphs, FP8 matmuls, executed blocks."""

from __future__ import annotations

import gc
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fp8doctor.examine.environment import variables_put_back
from fp8doctor.files import own_folder
from fp8doctor.profiling.kernel_families import FP8_GEMM_KERNEL, FP8_OPERATORS
from fp8doctor.profiling.trace import Trace, read_trace
from fp8doctor.stacks import torch_private

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


def profiled(
    step: Callable[[], object],
    device: torch.device,
    *,
    to_divide: bool = False,
) -> Trace:
    """Run one step under the profiler and read its trace.

    ``to_divide`` records the types of the operators' inputs. On CUDA it also keeps the GPU busy right up to
    the step: after a rest its clocks are higher than when the step was timed.
    """
    activities, settle = [torch.profiler.ProfilerActivity.CPU], None
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
        settle = torch.profiler.schedule(wait=0, warmup=1, active=1, repeat=1) if to_divide else None
    profile = torch.profiler.profile(activities=activities, schedule=settle, record_shapes=to_divide)
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
