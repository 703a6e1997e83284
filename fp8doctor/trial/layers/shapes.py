"""Time the matmuls of the model's own shapes in BF16 and FP8.

They take turns, so they share clocks. Before each one the L2 cache is flushed, because in a step a large
operand comes from memory. Casts are not timed: in a compiled step they are fused, so alone they take up to
twice as long, and whether a layer loses is decided by the model of `fp8doctor.cost` with or without that.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import Tensor

from fp8doctor.analysis.layer_gain import judged
from fp8doctor.analysis.layers import flops_share_pct, would_be_converted
from fp8doctor.cost.matmul_counts import rows_of
from fp8doctor.facts import Facts, LayerShape, Layout, Linear, if_recorded
from fp8doctor.facts.unrecorded import NOT_RECORDED
from fp8doctor.recipes import named, recipe_of
from fp8doctor.stacks import torch_private
from fp8doctor.trial.measure.trial_run import TrialRun, still_there
from fp8doctor.trial.state.settings import free
from fp8doctor.wording import percent, sentence

_log = logging.getLogger("fp8doctor")

PART = "shapes"
"""Name of this part in ``skip``: a worker that died in it is followed by one without it."""

MOST_SHAPES = 12
"""Distinct shapes that are timed, those with the most FLOPs. A model of one width has three to six."""

ROUNDS, FEWEST_ROUNDS = 9, 3
"""Rounds of which the median is taken; the fewer if one shape takes long."""

SHAPE_S = 0.25
"""Seconds for one shape after which no further round begins."""

FLUSHES = 4
"""Times the buffer is cleared before each matmul: about 0.1 ms on an H200, in which it is enqueued."""

CPU_FLOPS = 2e9
"""FLOPs of one matmul up to which it is timed on a CPU, whose FP8 matmuls do some 1e10 per second."""

NOTHING_TO_TIME = "there is no FP8 layer, nor one to convert, whose rows, sides and recipe are known here"

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

Operation = Callable[[], object]


def time_shapes(facts: Facts, run: TrialRun) -> tuple[tuple[LayerShape, ...], str | None]:
    """Time the distinct shapes, most FLOPs first; eight take about 2 s (`SHAPE_S`).

    Return them, and the reason if some are missing. A shape whose BF16 matmuls could not be timed is left
    out. They are not recorded if timing fails. Raises `DeviceLost`.
    """
    wanted, shapes, reasons = distinct(facts), list[LayerShape](), list[str]()
    if PART in run.skip:
        return NOT_RECORDED, run.skip[PART]
    if not wanted:
        return (), NOTHING_TO_TIME
    run.progress("timing the matmuls of its layers", PART)
    if left := wanted[MOST_SHAPES:]:
        share = percent(sum(share for _, share in left))
        words = f"{len(left)} of {len(wanted)} shapes, which have {share} of the matmul FLOPs"
        reasons.append(f"{words}, were not timed")
    slow = {linear.name for linear in of_interest(facts) if linear.features.get("use_fast_accum") is False}
    try:
        flush = _buffer(run.device)
        for shape, _ in wanted[:MOST_SHAPES]:
            try:
                shapes.append(_timed(shape, run.device, flush, fast=shape.layers[0] not in slow))
            except (RuntimeError, ValueError) as error:  # out of memory is one
                still_there(run.device, PART)
                reasons.append(f"M {shape.m}, K {shape.k}, N {shape.n}: {sentence(error)}")
    except Exception as error:
        _log.debug("timing the shapes raises", exc_info=True)
        return NOT_RECORDED, sentence(error)
    finally:
        flush = None
        free(run.device)
    return tuple(shapes), "; ".join(reasons) or None


def distinct(facts: Facts) -> list[tuple[LayerShape, float]]:
    """List the shapes that are, or could be, in FP8 with their share of the matmul FLOPs in per cent.

    The largest comes first.
    """
    found: dict[tuple[int, int, int, str, bool], list[Linear]] = {}
    for each in of_interest(facts):
        if rows := rows_of(each, facts):
            recipe = each.recipe or "tensorwise"
            key = (rows, each.in_features, each.out_features, recipe, each.requires_grad)
            found.setdefault(key, []).append(each)
    shapes = []
    for (m, k, n, recipe, trained), linears in found.items():
        names = tuple(each.name for each in linears)
        shape = LayerShape(m=m, k=k, n=n, recipe=recipe, trained=trained, layers=names)
        shapes.append((shape, flops_share_pct(linears, facts)))
    return sorted(shapes, key=lambda each: -each[1])


def of_interest(facts: Facts) -> list[Linear]:
    """List the layers that are in FP8; for a model without any, those that a conversion would take."""
    fp8 = if_recorded(judged, facts) or []
    if fp8 or any(linear.use == "training" for linear in facts.network.linears):
        return [linear for linear in fp8 if recipe_of(linear).timed_alone]
    return [linear for linear in facts.network.linears if would_be_converted(linear)]


@dataclass(frozen=True)
class Operands:
    """Operands of one Linear in a step: input (M, K), weight (N, K), output gradient (M, N)."""

    input: Tensor
    weight: Tensor
    gradient: Tensor

    @classmethod
    def of(cls, shape: LayerShape, device: torch.device) -> Operands:
        generator = torch.Generator(device).manual_seed(0)
        sides = ((shape.m, shape.k), (shape.n, shape.k), (shape.m, shape.n))
        empty = (torch.empty(each, dtype=torch.bfloat16, device=device) for each in sides)
        return cls(*(each.normal_(generator=generator) for each in empty))


def bf16_gemms(of: Operands, trained: bool) -> dict[Layout, Operation]:
    gemms: dict[Layout, Operation] = {
        "output": lambda: of.input @ of.weight.t(),
        "input_gradient": lambda: of.gradient @ of.weight,
    }
    return gemms | {"weight_gradient": lambda: of.gradient.t() @ of.input} if trained else gemms


def fp8_gemms(of: Operands, shape: LayerShape, fast: bool) -> dict[Layout, Operation]:
    """Compute the same in FP8, without what the recipe leaves in BF16.

    Layouts are those of torchao 0.18 (``float8_linear.py``, ``float8_ops.py``) and Transformer Engine. Under
    rowwise scaling the gradient matmuls run with the tensorwise kernel, as in torchao; the pass over their
    output is left out, because the compiler may fuse it. A transposed copy is replaced by the same memory in
    another shape: its values do not change the time.
    """
    m, k, n = shape.m, shape.k, shape.n
    input, weight = of.input.to(E4M3), of.weight.to(E4M3)
    # as torchao 0.18 `Float8LinearConfig.from_recipe_name` has it, and TE's format HYBRID
    gradient = of.gradient.to(E4M3 if shape.recipe.startswith("rowwise") else E5M2)
    one = torch.ones((), dtype=torch.float32, device=input.device)  # whatever the default dtype is
    rows = columns = one
    if named(shape.recipe).granularity == "row":
        rows, columns = one.new_ones((m, 1)), one.new_ones((1, n))
    gemms: dict[Layout, Operation] = {
        "output": lambda: scaled_mm(input, weight.t(), rows, columns, fast=fast),
        "input_gradient": lambda: scaled_mm(gradient, weight.view(k, n).t(), one, one, fast=False),
    }
    if not shape.trained or named(shape.recipe).weight_gradient_in_16_bits:
        return gemms
    left, right = gradient.view(n, m), input.view(k, m).t()
    return gemms | {"weight_gradient": lambda: scaled_mm(left, right, one, one, fast=False)}


def scaled_mm(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, *, fast: bool) -> Tensor:
    """Run one FP8 matmul with BF16 output, as torchao and plain torch call it (torch 2.6 to 2.13).

    ``fast`` accumulates with less precision.
    """
    product = torch_private.scaled_mm()
    assert product is not None
    result: Tensor = product(
        a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=torch.bfloat16, use_fast_accum=fast
    )
    return result


def _timed(shape: LayerShape, device: torch.device, flush: Tensor | None, *, fast: bool) -> LayerShape:
    """Time the matmuls in BF16 and FP8 in turn, so each has the clocks that the other had."""
    if flush is None and 2 * shape.m * shape.k * shape.n > CPU_FLOPS:
        raise ValueError("too large to be timed on a CPU")
    operands = Operands.of(shape, device)
    bf16, fp8, reason = bf16_gemms(operands, shape.trained), dict[Layout, Operation](), None
    try:
        fp8 = fp8_gemms(operands, shape, fast)
        for operation in fp8.values():
            operation()
    except (RuntimeError, ValueError) as error:
        still_there(device, PART)
        fp8, reason = {}, sentence(error)
    operations = {
        (layout, dtype): of[layout]
        for layout in bf16
        for dtype, of in (("bf16", bf16), ("fp8", fp8))
        if layout in of
    }
    ms = turns(operations, device, flush)
    in_bf16 = {layout: ms[layout, "bf16"] for layout in bf16}
    in_fp8 = [ms.get((layout, "fp8"), in_bf16[layout]) for layout in bf16]  # with what stays in BF16
    return msgspec.structs.replace(
        shape,
        bf16_ms=sum(in_bf16.values()),
        fp8_ms=sum(in_fp8) if fp8 else None,
        casts_ms=None,
        reason=reason,
    )


def turns(
    operations: Mapping[tuple[Layout, str], Operation], device: torch.device, flush: Tensor | None
) -> dict[tuple[Layout, str], float]:
    """Return the median time in ms of each, after one warm-up run; ``flush`` fills the cache of a GPU."""
    for operation in operations.values():
        operation()
    times: dict[tuple[Layout, str], list[float]] = {key: [] for key in operations}
    until = time.monotonic() + SHAPE_S
    for number in range(ROUNDS):
        if number >= FEWEST_ROUNDS and time.monotonic() > until:
            break
        for key, ms in _round(operations, device, flush).items():
            times[key].append(ms)
    return {key: statistics.median(each) for key, each in times.items()}


def _round(
    operations: Mapping[tuple[Layout, str], Operation], device: torch.device, flush: Tensor | None
) -> dict[tuple[Layout, str], float]:
    marks: dict[tuple[Layout, str], tuple[Any, Any]] = {}
    if flush is None:
        for key, operation in operations.items():
            began = time.perf_counter()
            operation()
            marks[key] = began, time.perf_counter()
        return {key: (ended - began) * 1e3 for key, (began, ended) in marks.items()}
    with torch.cuda.device(device):  # events belong to the current device
        for key, operation in operations.items():
            for _ in range(FLUSHES):
                flush.zero_()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            operation()
            end.record()
            marks[key] = begin, end
        torch.cuda.synchronize(device)
    return {key: float(begin.elapsed_time(end)) for key, (begin, end) in marks.items()}


def _buffer(device: torch.device) -> Tensor | None:
    """Make a buffer of twice the GPU's cache, so nothing of an operand is left there; None on a CPU."""
    if device.type != "cuda":
        return None
    size = 2 * getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0) or 2**27
    return torch.empty(size, dtype=torch.int8, device=device)
