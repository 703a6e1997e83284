"""Time one variant of a patient's training step in plain PyTorch, without fp8doctor: the truth that a trial
is held to.

``python tests/benchmarks/plain_step.py PATIENT.py VARIANT`` prints one JSON line: the median step in ms and
the peak in GiB. VARIANT is as_is, bf16, bf16_compiled or prescribed (compiled block by block). Steps run for
seconds before and while they are timed: a GPU at its power limit is slower in the long run of a training than
in a burst.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
import statistics
import sys
import time

import torch
from torch import nn

WARM_UP, STEPS = 5, 12
"""At least so many steps before, and in, the timed window."""

WARM_UP_S, WINDOW_S = 2.0, 3.0
"""At least so many seconds of steps, compilation not counted."""


def patient(path: str) -> object:
    spec = importlib.util.spec_from_file_location("patient", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["patient"] = module
    spec.loader.exec_module(module)
    return module


def in_bf16(model: nn.Module) -> nn.Module:
    """Every Float8Linear replaced by an nn.Linear over the same weight."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__ == "Float8Linear":
                plain = nn.Linear(
                    child.in_features, child.out_features, bias=child.bias is not None, device="meta"
                )
                plain.weight, plain.bias = child.weight, child.bias
                setattr(parent, name, plain)
    return model


def blocks(model: nn.Module) -> list[nn.Module]:
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) > 1]
    return list(max(lists, key=len))


def main(path: str, variant: str) -> None:
    job = patient(path)
    model = job.build_model()  # type: ignore[attr-defined]
    batch = job.example_batch()  # type: ignore[attr-defined]
    for module in model.modules():
        if variant != "as_is":
            module._compiled_call_impl = None
    if variant.startswith("bf16"):
        in_bf16(model)
    if variant in ("bf16_compiled", "prescribed"):
        for block in blocks(model):
            block.compile()
    optimizer = torch.optim.AdamW(
        [each for each in model.parameters() if each.requires_grad], lr=1e-5, fused=True
    )

    def step() -> None:
        output = model(**batch) if isinstance(batch, dict) else model(batch)
        loss = job.loss(output, batch) if hasattr(job, "loss") else output.loss  # type: ignore[attr-defined]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    for _ in range(WARM_UP):
        step()
    torch.cuda.synchronize()
    began, steps = time.monotonic(), 0
    while time.monotonic() - began < WARM_UP_S:
        step()
        torch.cuda.synchronize()
        steps += 1
    steps = max(STEPS, math.ceil(WINDOW_S * steps / (time.monotonic() - began)))
    torch.cuda.reset_peak_memory_stats()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    for mark in marks[:-1]:
        mark.record()
        step()
    marks[-1].record()
    torch.cuda.synchronize()
    times = sorted([a.elapsed_time(b) for a, b in itertools.pairwise(marks)][1:])
    quarter = len(times) // 4
    spread = {"quarter_ms": times[quarter], "three_quarters_ms": times[-1 - quarter]}
    print(
        json.dumps(
            {
                "step_ms": statistics.median(times),
                **spread,
                "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:3])
