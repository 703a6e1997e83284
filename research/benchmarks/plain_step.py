"""Time one variant of a job's training step in plain PyTorch, without fp8doctor: the truth that a trial is
held to.

``python research/benchmarks/plain_step.py JOB.py`` imports the job and prints the names of its ``VARIANTS``.
A line on stdin, a JSON list of such names, has it make these changes one after the other, each with
``=LAYER,LAYER`` where it takes layers, compile, and print ``ready``. ``plan=REPORT.json`` is the change that
the report's plan prints (`printed_plan.py`). The next line has it time the step and
print the median in ms, the peak in GiB, and the share of the step in which the GPU ran nothing; so whoever
times several lets them compile side by side, and one at a time use the GPU. Steps run for seconds before and
while they are timed: a GPU at its power limit is slower in the long run of a training than in a burst.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from research.benchmarks.printed_plan import PLAN, apply_plan

WARM_UP, STEPS = 5, 30
"""At least so many steps before, and in, the timed window."""

WARM_UP_S, WINDOW_S = 1.5, 3.0
"""At least so many seconds of steps, compilation not counted."""


def loaded(path: Path) -> ModuleType:
    """Run the job's file, with its folder on the path as a script has it."""
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def changed(job: Any, model: nn.Module, changes: Sequence[str]) -> nn.Module:
    """Make the changes by hand, one after the other."""
    for change in changes:
        name, _, layers = change.partition("=")
        if name == PLAN:
            applied = apply_plan(job, model, layers)
            model, job.applied_plan = applied.model, applied.report()
            continue
        model = job.VARIANTS[name](model, *([layers.split(",")] if layers else []))
    return model


def training_step(job: Any, changes: Sequence[str]) -> Callable[[], torch.Tensor]:
    """Build the job with its changes; the step is what a training loop runs."""
    made = job.build_model()
    model, optimizer = made if isinstance(made, tuple) else (made, None)
    model = changed(job, model, changes)
    trained = [each for each in model.parameters() if each.requires_grad]
    if hasattr(job, "build_optimizer"):
        optimizer = job.build_optimizer(model)
    if optimizer is None or not holds(optimizer, trained):
        optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)
    batch, dtype = job.example_batch(), getattr(job, "autocast", None)
    kind = "cuda" if torch.cuda.is_available() else "cpu"

    def micro_batch() -> torch.Tensor:
        with torch.autocast(kind, dtype=dtype) if dtype else nullcontext():
            if hasattr(job, "training_step"):
                loss = job.training_step(model, batch)
            else:
                output = model(**batch) if isinstance(batch, dict) else model(batch)
                loss = job.loss(output, batch) if hasattr(job, "loss") else output.loss
        loss.backward()
        return loss

    def step() -> torch.Tensor:
        for _ in range(getattr(job, "accumulate", 1)):
            loss = micro_batch()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def holds(optimizer: torch.optim.Optimizer, trained: Sequence[nn.Parameter]) -> bool:
    """Whether it updates all of these: a change may have put others in the place of the job's."""
    held = {id(each) for group in optimizer.param_groups for each in group["params"]}
    return held.issuperset(map(id, trained))


def compiled(step: Callable[[], object]) -> None:
    """Run the steps that compile."""
    for _ in range(WARM_UP if torch.cuda.is_available() else 1):
        step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def warmed_up(step: Callable[[], object]) -> int:
    """Run steps until the window may begin; return how many it should have."""
    began, steps = time.monotonic(), 0
    while time.monotonic() - began < WARM_UP_S:
        step()
        torch.cuda.synchronize()
        steps += 1
    return max(STEPS, math.ceil(WINDOW_S * steps / (time.monotonic() - began)))


def timed(step: Callable[[], object]) -> dict[str, float | None]:
    """Time the step on the GPU."""
    steps = warmed_up(step)
    torch.cuda.reset_peak_memory_stats()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    for mark in marks[:-1]:
        mark.record()
        step()
    marks[-1].record()
    torch.cuda.synchronize()
    times = sorted([a.elapsed_time(b) for a, b in itertools.pairwise(marks)][1:])
    quarter, median = len(times) // 4, statistics.median(times)
    return {
        "step_ms": median,
        "quarter_ms": times[quarter],
        "three_quarters_ms": times[-1 - quarter],
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "idle_share": idle_share(step, median),
    }


def idle_share(step: Callable[[], object], step_ms: float) -> float | None:
    """Tell the share of the unprofiled step in which no kernel ran, from one profiled step; None where the
    profiler fails."""
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            step()
            torch.cuda.synchronize()
        events = profile.profiler.kineto_results.events()
        on_gpu = sorted(
            (each.start_ns(), each.start_ns() + each.duration_ns())
            for each in events
            if each.device_type() == torch.autograd.DeviceType.CUDA and not each.is_user_annotation()
        )
    except (RuntimeError, AttributeError):
        return None
    busy, until = 0, 0
    for start, end in on_gpu:
        busy += max(0, end - max(start, until))
        until = max(until, end)
    return max(0.0, 1 - busy / 1e6 / step_ms)


def tried(step: Callable[[], object]) -> dict[str, float | None]:
    """Take a step on a CPU, whose time says nothing."""
    began = time.perf_counter()
    step()
    return {"step_ms": 1e3 * (time.perf_counter() - began), "peak_gib": None, "idle_share": None}


def main(path: str) -> None:
    """Time what stdin names and print it."""
    with redirect_stdout(sys.stderr):  # what a library prints is no answer
        job = loaded(Path(path).resolve())
        answer(json.dumps([*job.VARIANTS, PLAN]))
        changes = json.loads(sys.stdin.readline())
        torch.manual_seed(0)
        step = training_step(job, changes)
        compiled(step)
        answer("ready")
        sys.stdin.readline()
        found = timed(step) if torch.cuda.is_available() else tried(step)
        applied = getattr(job, "applied_plan", None)
        answer(json.dumps(found | ({PLAN: applied} if applied else {})))


def answer(line: str) -> None:
    """Print a line for whoever asked."""
    print(line, file=sys.__stdout__, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
