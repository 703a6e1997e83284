"""The GEMMs of the model's own shapes, timed alone in BF16 and in FP8, and the casts that FP8 needs for them.

BF16 and FP8 GEMMs (`fp8doctor.trial.layers.gemms`) take turns, so that they share clocks. Before each the L2
cache is flushed: in a step a large operand comes from memory. The casts (`fp8doctor.trial.layers.casts`) are
timed without what they could be fused with.
"""

from __future__ import annotations

import functools
import itertools
import logging
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TypeVar

import msgspec
import torch
from torch import Tensor

from fp8doctor.analysis.layer_gain import judged
from fp8doctor.analysis.layers import flops_share_pct, would_be_converted
from fp8doctor.cost import rows_of
from fp8doctor.facts import Facts, LayerGemm, LayerShape, Linear, if_recorded
from fp8doctor.facts.unrecorded import NOT_RECORDED
from fp8doctor.loading.job import Job
from fp8doctor.recipes import recipe_of
from fp8doctor.trial.layers import casts
from fp8doctor.trial.layers.gemms import (
    KEPT_IN_BF16,
    LAYOUTS,
    Operands,
    Operation,
    bf16_gemms,
    fp8_gemms,
)
from fp8doctor.trial.measure.trial_run import DeviceLost, still_there
from fp8doctor.trial.state.undisturbed import Undisturbed, free
from fp8doctor.wording import percent, sentence

_log = logging.getLogger("fp8doctor")

Result = TypeVar("Result")

ARM = "shapes"
"""This part's name in ``skip``, which a new worker leaves out when the one before died of it."""

SHARE = 0.1
"""Of the trial's budget: six of 60 s. Eight shapes take about 2 s (`SHAPE_S`), and the one compilation some
seconds."""

COMPILING_S = {"cuda": 3.0, "cpu": 20.0}
"""Least time for compiling the casts, which cannot be stopped. One small graph takes 10 to 15 s with a CPU's
C++ compiler (two cores, torch 2.13)."""

MOST_SHAPES = 12
"""Distinct shapes that are timed, those with the most FLOPs. A model of one width has three to six."""

ROUNDS, FEWEST_ROUNDS = 9, 3
"""Turns that the median is taken of; the fewer when one shape takes long."""

SHAPE_S = 0.25
"""Time of one shape after which no further round is taken."""

FLUSHES = 4
"""Times the buffer is cleared before each GEMM: about 0.1 ms on an H200, in which the GEMM is enqueued."""

LAUNCH_FLUSHES = 12
"""The same before compiled casts, whose launches take the host longer."""

CPU_FLOPS = 2e9
"""FLOPs of one GEMM up to which it is timed on a CPU, whose FP8 GEMMs do some 1e10 a second."""

NOTHING_TO_TIME = "there is no FP8 layer, nor one to convert, whose rows, sides and recipe are known here"


def probe(facts: Facts, device: torch.device, *, until: float) -> tuple[LayerShape, ...]:
    """Time every distinct shape, those with the most FLOPs first, until the clock (``time.monotonic``) passes
    ``until``.

    A shape whose BF16 GEMMs could not be timed is left out.
    """
    return timed(facts, device, until=until)[0]


def probe_beside(
    job: Job,
    facts: Facts,
    device: torch.device,
    *,
    until: float,
    progress: Callable[[str, str | None], object],
    reason_against: str | None,
) -> tuple[tuple[LayerShape, ...], str | None]:
    """Time the shapes in the user's process, and tell what is missing and why.

    The process is left as it was, but for the compiler's workers. The shapes are not recorded where nothing
    could be timed. Raises `DeviceLost`.
    """
    if reason_against is not None:
        return NOT_RECORDED, reason_against
    if not distinct(facts):
        return (), NOTHING_TO_TIME
    progress("timing the matmuls of its layers", ARM)
    try:
        with Undisturbed(job, keep_workers=True):
            return timed(facts, device, until=until)
    except DeviceLost:
        raise
    except Exception as error:
        _log.debug("timing the shapes raises", exc_info=True)
        free(device)
        return NOT_RECORDED, sentence(error)


def timed(facts: Facts, device: torch.device, *, until: float) -> tuple[tuple[LayerShape, ...], str | None]:
    """Time the shapes, and tell what was left out of them and why."""
    wanted, bench = distinct(facts), Timer(device)
    shapes, reasons = [], _beyond(wanted)
    slow = {linear.name for linear in of_interest(facts) if linear.features.get("use_fast_accum") is False}
    for shape, _ in wanted[:MOST_SHAPES]:
        if time.monotonic() > until:
            reasons.append(f"{shape_in_words(shape)}: no time was left")
            continue
        try:
            shapes.append(_with_gemms(shape, bench, shape.layers[0] not in slow))
        except (RuntimeError, ValueError) as error:  # out of memory is one
            still_there(bench.device, ARM)
            reasons.append(f"{shape_in_words(shape)}: {sentence(error)}")
            free(device)
    shapes = _with_casts(shapes, bench, until)
    bench.close()
    return tuple(shapes), "; ".join(reasons) or None


def distinct(facts: Facts) -> list[tuple[LayerShape, float]]:
    """List the shapes of what is, or could be, in FP8, with their shares of the GEMM FLOPs in per cent, the
    largest first."""
    found: dict[tuple[int, int, int, str, bool], list[Linear]] = {}
    for linear in of_interest(facts):
        rows = rows_of(linear, facts)
        if rows:
            key = (
                rows,
                linear.in_features,
                linear.out_features,
                linear.recipe or "tensorwise",
                linear.requires_grad,
            )
            found.setdefault(key, []).append(linear)
    shapes = [
        (
            LayerShape(
                m=m, k=k, n=n, recipe=recipe, trained=trained, layers=tuple(each.name for each in linears)
            ),
            flops_share_pct(linears, facts),
        )
        for (m, k, n, recipe, trained), linears in found.items()
    ]
    return sorted(shapes, key=lambda each: -each[1])


def of_interest(facts: Facts) -> list[Linear]:
    """List the layers that are in FP8; on a model without any, those that a conversion would take."""
    fp8 = if_recorded(judged, facts) or []
    if fp8 or any(linear.use == "training" for linear in facts.network.linears):
        return [linear for linear in fp8 if recipe_of(linear).timed_alone]
    return [linear for linear in facts.network.linears if would_be_converted(linear)]


def _beyond(wanted: list[tuple[LayerShape, float]]) -> list[str]:
    """Say what was left out of the shapes beyond `MOST_SHAPES`."""
    if len(wanted) <= MOST_SHAPES:
        return []
    left = sum(share for _, share in wanted[MOST_SHAPES:])
    return [
        f"{len(wanted) - MOST_SHAPES} of {len(wanted)} shapes, which have {percent(left)} of the matmul "
        "FLOPs, were not timed"
    ]


def shape_in_words(shape: LayerShape) -> str:
    """Name a shape in a reason."""
    return f"M {shape.m}, K {shape.k}, N {shape.n}"


class Timer:
    """Times operations that take turns."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.on_gpu = device.type == "cuda"
        self._buffer: Tensor | None = None
        if self.on_gpu:
            # Twice the cache, so that nothing of an operand is left in it.
            size = 2 * getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0) or 2**27
            self._buffer = torch.empty(size, dtype=torch.int8, device=device)

    def turns(self, operations: Mapping[str, Operation], flushes: int = FLUSHES) -> dict[str, float]:
        """Return the median time in ms of each, after one run to warm up, in which it is compiled if ever."""
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
            return {name: _host_ms(operation) for name, operation in operations.items()}
        assert self._buffer is not None
        marks = {}
        with torch.cuda.device(self.device):  # events are of the current device
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
        """Give the memory back."""
        self._buffer = None
        free(self.device)


def _host_ms(operation: Operation) -> float:
    began = time.perf_counter()
    operation()
    return (time.perf_counter() - began) * 1e3


def _with_gemms(shape: LayerShape, bench: Timer, fast: bool) -> LayerShape:
    """Time the GEMMs of the shape; ``fast`` says how the forward accumulates."""
    if not bench.on_gpu and 2 * shape.m * shape.k * shape.n > CPU_FLOPS:
        raise ValueError("too large to be timed on a CPU")
    operands = Operands.of(shape, bench.device)
    bf16 = bf16_gemms(operands, shape.trained)
    try:
        fp8 = fp8_gemms(operands, shape, fast)
        for operation in fp8.values():
            operation()
    except (RuntimeError, ValueError) as error:
        still_there(bench.device, ARM)
        times = bench.turns(bf16)
        return msgspec.structs.replace(
            shape,
            bf16_ms=sum(times.values()),
            fp8_ms=None,
            gemms=_one_by_one(times, bf16, ()),
            casts_ms=None,
            reason=sentence(error),
        )
    # In turns of a BF16 GEMM and an FP8 one: each has the clocks that the other had.
    times = bench.turns(
        {name: operation for pair in zip(bf16.items(), fp8.items(), strict=True) for name, operation in pair}
    )
    in_bf16, in_fp8 = (sum(times[name] for name in each) for each in (bf16, fp8))
    return msgspec.structs.replace(
        shape,
        bf16_ms=in_bf16,
        fp8_ms=in_fp8,
        gemms=_one_by_one(times, bf16, fp8),
        casts_ms=None,
        reason=None,
    )


def _one_by_one(
    times: Mapping[str, float], bf16: Collection[str], fp8: Collection[str]
) -> tuple[LayerGemm, ...]:
    """Tell the times of each layout; ``bf16`` and ``fp8`` name the operations in the order of `LAYOUTS`."""
    return tuple(
        LayerGemm(
            layout=layout,
            bf16_ms=times[in_bf16],
            fp8_ms=None if in_fp8 in (None, KEPT_IN_BF16) else times[in_fp8],
        )
        for layout, in_bf16, in_fp8 in itertools.zip_longest(LAYOUTS[: len(bf16)], bf16, fp8)
    )


def _with_casts(shapes: list[LayerShape], bench: Timer, until: float) -> list[LayerShape]:
    """Time the casts of the shapes, as far as the time goes, and tell why some have none.

    They are compiled for one number of rows after the other, the one with the most FLOPs first.
    """
    done: dict[LayerShape, LayerShape] = {}
    for rows in dict.fromkeys(shape.m for shape in shapes):
        wanted = [shape for shape in shapes if shape.fp8_ms is not None and shape.m == rows]
        if wanted and until - time.monotonic() >= COMPILING_S[bench.device.type]:
            done |= _casts_timed(wanted, bench, until)
    return [done.get(shape) or _without_casts(shape, "no time was left") for shape in shapes]


def _casts_timed(wanted: list[LayerShape], bench: Timer, until: float) -> dict[LayerShape, LayerShape]:
    """Time the casts of shapes that have the same rows, as many as the time is enough for."""
    done: dict[LayerShape, LayerShape] = {}
    try:
        compiled = casts.compiled(_examples(wanted, bench.device))
    except Exception as error:  # whatever the compiler raises
        _log.debug("compiling the casts raises", exc_info=True)
        return {shape: _failed(shape, error, bench) for shape in wanted}
    until = max(
        until, time.monotonic() + len(wanted) * SHAPE_S
    )  # the compiler may have taken all the time: then it is not for nothing
    for shape in wanted:
        if time.monotonic() > until and done:
            break
        try:
            arguments = _cast_arguments(shape, bench.device)
            operation = functools.partial(compiled, shape.recipe, shape.trained, *arguments)
            done[shape] = msgspec.structs.replace(
                shape, casts_ms=bench.turns({"casts": operation}, LAUNCH_FLUSHES)["casts"]
            )
        except (
            Exception
        ) as error:  # the compiler may be asked again, and the memory be too small for one of them
            done[shape] = _failed(shape, error, bench)
    return done


def _failed(shape: LayerShape, error: Exception, bench: Timer) -> LayerShape:
    still_there(bench.device, ARM)
    free(bench.device)
    return _without_casts(shape, sentence(error))


def _without_casts(shape: LayerShape, reason: str) -> LayerShape:
    return (
        shape
        if shape.fp8_ms is None
        else msgspec.structs.replace(shape, casts_ms=None, reason=f"its casts were not timed: {reason}")
    )


def _examples(
    shapes: list[LayerShape], device: torch.device
) -> Iterator[tuple[casts.Kind, tuple[Tensor, ...]]]:
    """Pick the largest shape of each kind that is not square: what takes the time is what to tune for."""
    for kind in dict.fromkeys((shape.recipe, shape.trained) for shape in shapes):
        of_kind = [shape for shape in shapes if (shape.recipe, shape.trained) == kind]
        example = next(
            (shape for shape in of_kind if shape.k != shape.n),
            msgspec.structs.replace(of_kind[0], n=2 * of_kind[0].n),
        )
        yield kind, _cast_arguments(example, device)


def _cast_arguments(shape: LayerShape, device: torch.device) -> tuple[Tensor, ...]:
    of = Operands.of(shape, device)
    return casts.arguments(of.input, of.weight, of.gradient)
