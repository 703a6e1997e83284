"""Proof that an arm ran what its label says: graphs compiled and run, FP8 GEMMs, executed blocks.

Private names read here, verified on torch 2.11 and 2.13: ``torch._dynamo.utils.counters`` (``frames``,
``graph_break``) and the raw events of the profiler, whose ``key_averages`` would take seconds.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch._C._autograd import DeviceType

FP8_OPERATORS = frozenset({"aten::_scaled_mm", "aten::_scaled_mm_v2", "aten::_scaled_grouped_mm", "aten::_scaled_grouped_mm_v2"})

FP8_GEMM_KERNEL = re.compile(r"^nvjet_(sm\d+_)?[a-z]*q[a-z]*_|xmma_gemm_e[45]m[23]|cutlass.*(e4m3|e5m2)|float_e[45]m[23]|deep_gemm|fp8_gemm|f8f8bf16")
"""GEMM kernels with an FP8 operand: cuBLASLt's ``nvjet`` names e4m3 ``q`` (``qqtst``, ``qrtst``), seen on an H200 with
torchao 0.18 and TE 2.20.2; the others from public traces and sources."""

COMPILED_REGION = "Torch-Compiled Region"


@dataclass(frozen=True)
class Compiled:
    """Frames that Dynamo compiled and graph breaks it met, since the process began."""

    frames: int
    breaks: int


def compiled_so_far() -> Compiled:
    from torch._dynamo.utils import counters

    return Compiled(counters["frames"].get("ok", 0), sum(counters["graph_break"].values()))


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
