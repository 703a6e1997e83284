"""What a trace of a user's profiler says: whether FP8 ran, why the GPU waits, and what to look at."""

from collections.abc import Iterator
from typing import Any

from fp8doctor.analysis.step_difference import HOST_BOUND_PCT
from fp8doctor.diagnosis.document import SCHEMA_VERSION, Tool, tool
from fp8doctor.facts.record import Record, encode, to_builtins
from fp8doctor.facts.trial import TracedStep
from fp8doctor.wording import percent


class Hint(Record, frozen=True, kw_only=True):
    """A part of the trace to look at, and the check's code; empty without one."""

    code: str
    text: str


class Traces(Record, frozen=True, kw_only=True):
    """A trace, in lists of one."""

    tool: Tool
    steps: tuple[TracedStep, ...]
    summaries: tuple[str, ...]
    """Whether FP8 ran, and what the GPU waits for."""
    hints: tuple[tuple[Hint, ...], ...]

    def to_json(self) -> str:
        data: dict[str, Any] = {"schema_version": SCHEMA_VERSION, "kind": "traces", **to_builtins(self)}
        return encode(data).decode()


def conclude(step: TracedStep) -> Traces:
    said = " ".join(filter(None, (whether_fp8_ran(step), why_it_waits(step))))
    return Traces(tool=tool(), steps=(step,), summaries=(said,), hints=(tuple(what_comes_first(step)),))


IDLE = {
    "late_launch": "launched too late",
    "data_loader": "data loader",
    "synchronization": "after synchronizing",
    "host_copy": "host copying",
    "compilation": "compiling",
    "in_time": "between kernels",
    "unknown": "launch unknown",
}
"""Cause of idle time -> its name."""

CASTS_TO_TELL = 0.5
"""Casts / FP8 matmuls, in time, from which casts that no compiler fused are reported. Seen in a 468M decoder
on an H200: 0.98 compiled, 9.2 eager."""

FP32_TO_TELL_PCT = 5.0
"""Share of the step in fp32 matmuls, in per cent, from which they are reported. A convention of this tool."""


def shown(ms: float) -> str:
    """Write a time, a step's of microseconds too."""
    return f"{ms:,.2f}"


def whether_fp8_ran(step: TracedStep) -> str:
    """Tell whether FP8 matmuls ran, and what they and the casts take."""
    fp8_ms, in_16_bits_ms, fp32_ms, casts_ms = (
        step.families_ms.get(family, 0.0) for family in ("gemm_fp8", "gemm_16bit", "gemm_fp32", "cast")
    )
    casts = f" Casts to and from FP8 take {shown(casts_ms)} ms." if casts_ms else ""
    others = f"matmuls took {shown(in_16_bits_ms)} ms in 16 bits and {shown(fp32_ms)} in fp32"
    if fp8_ms:
        share = percent(100 * fp8_ms / (fp8_ms + in_16_bits_ms + fp32_ms)) + " of the time of all matmuls"
        count = sum(kernel.count for kernel in step.of_family("gemm_fp8"))
        return f"FP8 matmuls ran: {count:,.0f} in {shown(fp8_ms)} ms, {share}.{casts}"
    if unknown_ms := step.families_ms.get("unknown", 0.0):
        return f"No known FP8 matmul ran: {others}, unknown kernels {shown(unknown_ms)}.{casts}"
    return f"No FP8 matmul ran: {others}.{casts}"


def why_it_waits(step: TracedStep) -> str:
    """Say how long the GPU was idle, and mostly why; empty if that is little."""
    share = 100 * step.gpu_idle_ms / step.step_ms if step.step_ms else 0.0
    if share < HOST_BOUND_PCT:
        return ""
    cause, longest = max(step.idle_ms.items(), key=lambda item: item[1])
    most = percent(100 * longest / step.gpu_idle_ms)
    return f"The GPU had nothing to do for {percent(share)} of the time, {most} of that: {IDLE[cause]}."


def what_comes_first(step: TracedStep) -> Iterator[Hint]:
    """Yield what to look at."""
    share = {cause: 100 * ms / step.step_ms for cause, ms in step.idle_ms.items()}
    arriving = sum(each.time_ms for each in step.of_family("copy") if each.name.startswith("Memcpy HtoD"))
    feeding = share.get("data_loader", 0.0) + share.get("host_copy", 0.0) + 100 * arriving / step.step_ms
    if feeding >= HOST_BOUND_PCT:
        waits = f"{percent(feeding)} of the time the GPU waits for data, which FP8 does not bring sooner"
        yield Hint(code="", text=waits)
    if share.get("late_launch", 0.0) + share.get("synchronization", 0.0) >= HOST_BOUND_PCT:
        slow = "the host is slower than the GPU, at least while it is profiled; FP8 needs more launches, and "
        yield Hint(code="STP001", text=f"{slow}makes that worse")
    fp8_ms = step.families_ms.get("gemm_fp8", 0.0)
    eager = [each for each in step.of_family("cast") if (each.operator or "").startswith("aten::")]
    if fp8_ms and sum(each.time_ms for each in eager) >= CASTS_TO_TELL * fp8_ms:
        kernels = sum(each.count for each in eager)
        text = f"the casts run as {kernels:,.0f} unfused kernels of code that is not compiled"
        yield Hint(code="CMP001", text=text)
    if 100 * step.families_ms.get("gemm_fp32", 0.0) / step.step_ms >= FP32_TO_TELL_PCT:
        yield Hint(code="STP004", text="matmuls run in fp32")
