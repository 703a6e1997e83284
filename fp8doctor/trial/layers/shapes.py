"""Time the matmuls of the model's own shapes in BF16 and FP8, and the casts that FP8 needs for them.

They take turns, so they share clocks. Before each one the L2 cache is flushed, because in a step a large
operand comes from memory. Casts are timed without the operations that they could be fused with.
"""

from __future__ import annotations

import functools
import logging
import statistics
import time
from collections.abc import Callable, Iterator, Mapping

import msgspec
import torch
from torch import Tensor

from fp8doctor.analysis.layer_gain import judged
from fp8doctor.analysis.layers import flops_share_pct, would_be_converted
from fp8doctor.cost.matmul_counts import rows_of
from fp8doctor.facts import Facts, LayerShape, Layout, Linear, if_recorded
from fp8doctor.facts.unrecorded import NOT_RECORDED
from fp8doctor.recipes import recipe_of
from fp8doctor.trial.layers.linear_operations import (
    Operands,
    Operation,
    bf16_gemms,
    cast_arguments,
    compiled_casts,
    fp8_gemms,
)
from fp8doctor.trial.measure.timer import Block, block_ms
from fp8doctor.trial.measure.trial_run import TrialRun, still_there
from fp8doctor.trial.state.settings import free
from fp8doctor.wording import percent, sentence

_log = logging.getLogger("fp8doctor")

PART = "shapes"
"""Name of this part in ``skip``: a worker that died in it is followed by one without it."""

SHARE = 0.1
"""Share of the trial's budget: 6 s of 60. Eight shapes take about 2 s (`SHAPE_S`), and each graph of casts
some seconds."""

COMPILING_S = {"cuda": 3.0, "cpu": 20.0}
"""Least seconds that a graph of casts is expected to compile. One small graph takes 10 to 15 s with a CPU's
C++ compiler (two cores, torch 2.13)."""

MOST_SHAPES = 12
"""Distinct shapes that are timed, those with the most FLOPs. A model of one width has three to six."""

ROUNDS, FEWEST_ROUNDS = 9, 3
"""Rounds of which the median is taken; the fewer if one shape takes long."""

SHAPE_S = 0.25
"""Seconds for one shape after which no further round begins."""

FLUSHES = 4
"""Times the buffer is cleared before each matmul: about 0.1 ms on an H200, in which it is enqueued."""

LAUNCH_FLUSHES = 12
"""The same before compiled casts, whose launches take the host longer."""

CPU_FLOPS = 2e9
"""FLOPs of one matmul up to which it is timed on a CPU, whose FP8 matmuls do some 1e10 per second."""

NOTHING_TO_TIME = "there is no FP8 layer, nor one to convert, whose rows, sides and recipe are known here"

NO_TIME, NO_CASTS = "no time was left", "its casts were not timed"


def time_shapes(facts: Facts, run: TrialRun, until: float) -> tuple[tuple[LayerShape, ...], str | None]:
    """Time the distinct shapes, most FLOPs first, until the clock (``time.monotonic``) passes ``until``.

    Return them, and the reason if some are missing. A shape whose BF16 matmuls could not be timed is left
    out. They are not recorded if timing fails. Raises `DeviceLost`.
    """
    wanted = distinct(facts)
    if PART in run.skip:
        return NOT_RECORDED, run.skip[PART]
    if not wanted:
        return (), NOTHING_TO_TIME
    run.progress("timing the matmuls of its layers", PART)
    try:
        return _timed(wanted, facts, run.device, until)
    except Exception as error:
        _log.debug("timing the shapes raises", exc_info=True)
        free(run.device)
        return NOT_RECORDED, sentence(error)


def _timed(
    wanted: list[tuple[LayerShape, float]], facts: Facts, device: torch.device, until: float
) -> tuple[tuple[LayerShape, ...], str | None]:
    bench, shapes, reasons = Timer(device), list[LayerShape](), list[str]()
    if left := wanted[MOST_SHAPES:]:
        share = percent(sum(share for _, share in left))
        words = f"{len(left)} of {len(wanted)} shapes, which have {share} of the matmul FLOPs"
        reasons.append(f"{words}, were not timed")
    slow = {linear.name for linear in of_interest(facts) if linear.features.get("use_fast_accum") is False}
    for shape, _ in wanted[:MOST_SHAPES]:
        words = f"M {shape.m}, K {shape.k}, N {shape.n}"
        if time.monotonic() > until:
            reasons.append(f"{words}: {NO_TIME}")
            continue
        try:
            shapes.append(_with_gemms(shape, bench, shape.layers[0] not in slow))
        except (RuntimeError, ValueError) as error:  # out of memory is one
            still_there(device, PART)
            reasons.append(f"{words}: {sentence(error)}")
            free(device)
    timed = tuple(_with_casts(shapes, bench, until))
    bench.close()
    return timed, "; ".join(reasons) or None


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


class Timer:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.on_gpu = device.type == "cuda"
        self._buffer: Tensor | None = None
        if self.on_gpu:
            # Twice the cache, so nothing of an operand is left in it.
            size = 2 * getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0) or 2**27
            self._buffer = torch.empty(size, dtype=torch.int8, device=device)

    def turns(self, operations: Mapping[str, Operation], flushes: int = FLUSHES) -> dict[str, float]:
        """Return the median time in ms of each, after one warm-up run, which may compile."""
        for operation in operations.values():
            operation()
        times: dict[str, list[float]] = {name: [] for name in operations}
        until = time.monotonic() + SHAPE_S
        for number in range(ROUNDS):
            if number >= FEWEST_ROUNDS and time.monotonic() > until:
                break
            for name, ms in self._round(operations, flushes).items():
                times[name].append(ms)
        return {name: statistics.median(each) for name, each in times.items()}

    def _round(self, operations: Mapping[str, Operation], flushes: int) -> dict[str, float]:
        if not self.on_gpu:
            return {name: block_ms(each, self.device, Block(0, 1)) for name, each in operations.items()}
        assert self._buffer is not None
        marks = {}
        with torch.cuda.device(self.device):  # events belong to the current device
            for name, operation in operations.items():
                for _ in range(flushes):
                    self._buffer.zero_()
                marks[name] = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
                marks[name][0].record()
                operation()
                marks[name][1].record()
            torch.cuda.synchronize(self.device)
        return {name: float(begin.elapsed_time(end)) for name, (begin, end) in marks.items()}

    def close(self) -> None:
        self._buffer = None
        free(self.device)


def _with_gemms(shape: LayerShape, bench: Timer, fast: bool) -> LayerShape:
    """Time the matmuls in BF16 and FP8 in turn, so each has the clocks that the other had."""
    if not bench.on_gpu and 2 * shape.m * shape.k * shape.n > CPU_FLOPS:
        raise ValueError("too large to be timed on a CPU")
    operands = Operands.of(shape, bench.device)
    bf16, fp8, reason = bf16_gemms(operands, shape.trained), dict[Layout, Operation](), None
    try:
        fp8 = fp8_gemms(operands, shape, fast)
        for operation in fp8.values():
            operation()
    except (RuntimeError, ValueError) as error:
        still_there(bench.device, PART)
        fp8, reason = {}, sentence(error)
    operations: dict[str, Operation] = {}
    for layout in bf16:
        operations[f"{layout} in bf16"] = bf16[layout]
        if layout in fp8:
            operations[f"{layout} in fp8"] = fp8[layout]
    times = bench.turns(operations)
    of_bf16 = [times[f"{each} in bf16"] for each in bf16]
    of_fp8 = [times.get(f"{each} in fp8", ms) for each, ms in zip(bf16, of_bf16, strict=True)]
    return msgspec.structs.replace(
        shape,
        bf16_ms=sum(of_bf16),
        fp8_ms=sum(of_fp8) if fp8 else None,  # with what the recipe keeps in BF16
        casts_ms=None,
        reason=reason,
    )


def _with_casts(shapes: list[LayerShape], bench: Timer, until: float) -> Iterator[LayerShape]:
    """Time the casts of the shapes, those with the most FLOPs first, and say why some have none.

    One graph serves all shapes with the same rows, recipe and training. Compiling cannot be stopped, so a
    graph is compiled only if the longest compilation so far would end before ``until``. If compiling took all
    the time, each shape of its graph still gets its `SHAPE_S`.
    """
    graphs: dict[tuple[int, str, bool], Callable[..., object]] = {}
    longest_s = COMPILING_S[bench.device.type]
    for shape in shapes:
        key, began = (shape.m, shape.recipe, shape.trained), time.monotonic()
        if shape.fp8_ms is None:
            yield shape
            continue
        if began + (SHAPE_S if key in graphs else longest_s) > until:
            yield msgspec.structs.replace(shape, reason=f"{NO_CASTS}: {NO_TIME}")
            continue
        try:
            if key not in graphs:
                alike = [each for each in shapes if (each.m, each.recipe, each.trained) == key]
                # the first that is not square, because equal sides would become one symbol
                example = next(
                    (each for each in alike if each.k != each.n),
                    msgspec.structs.replace(shape, n=2 * shape.n),
                )
                arguments = cast_arguments(Operands.of(example, bench.device))
                graphs[key] = compiled_casts(shape.recipe, shape.trained, arguments)
                until = max(until, time.monotonic() + len(alike) * SHAPE_S)
            arguments = cast_arguments(Operands.of(shape, bench.device))
            operation = functools.partial(graphs[key], shape.recipe, shape.trained, *arguments)
            operation()  # which may compile once more
            longest_s = max(longest_s, time.monotonic() - began)
            casts_ms = bench.turns({"casts": operation}, LAUNCH_FLUSHES)["casts"]
            yield msgspec.structs.replace(shape, casts_ms=casts_ms)
        except Exception as error:  # from the compiler, or the memory is too small
            _log.debug("timing the casts raises", exc_info=True)
            still_there(bench.device, PART)
            free(bench.device)
            yield msgspec.structs.replace(shape, reason=f"{NO_CASTS}: {sentence(error)}")
