"""The step of a saved report as a row of a table, and differences between two."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from msgspec.structs import replace

from fp8doctor.analysis.arms import timed_on_cpu
from fp8doctor.analysis.layers import tokens_of
from fp8doctor.analysis.noise import script_interval
from fp8doctor.analysis.own_step import as_is, watched
from fp8doctor.analysis.significance import interval
from fp8doctor.cost.matmul_counts import micro_batches
from fp8doctor.facts import Facts, if_recorded, recorded
from fp8doctor.facts.arm_names import Reason
from fp8doctor.facts.no_number import why_of
from fp8doctor.facts.record import Record
from fp8doctor.wording import plural


class TimedStep(Record, frozen=True, kw_only=True):
    """The step as a job takes it. ``None`` is not known, or not timed."""

    name: str
    step_ms: float | None = None
    low_ms: float | None = None
    """Interval that holds the step in a script with 90% confidence."""
    high_ms: float | None = None
    rounds_ms: tuple[float, ...] = ()
    tokens: int | None = None
    """Of a step, over all its micro-batches."""
    peak_gib: float | None = None
    measured_on: str = ""
    """Empty if nothing was timed."""
    on_cpu: bool = False
    """True if a CPU took the step, which says nothing about FP8 on a GPU."""
    predicted: bool = False
    """True if it was predicted from cuts of the model."""
    missing: str = ""
    """Why there is no time; empty if there is one."""

    @property
    def steps_per_s(self) -> float | None:
        return 1e3 / self.step_ms if self.step_ms else None

    @property
    def tokens_per_s(self) -> float | None:
        return self.tokens * 1e3 / self.step_ms if self.step_ms and self.tokens else None


def timed_step(facts: Facts, name: str) -> TimedStep:
    """Read the time of the step as it is; of the script's own steps if no trial timed a copy of them."""
    copy, own = as_is(facts), watched(facts)
    is_copy = bool(copy and copy.get("tried") and copy.get("step_ms"))
    timed, tokens = copy if is_copy else own, if_recorded(tokens_of, facts)
    step = TimedStep(name=name, tokens=tokens * micro_batches(facts) if tokens else None)
    if timed is None:
        why = (copy.get("reason") if copy else None) or facts.get("trial.reason")
        return replace(step, missing=why or "nothing was timed")
    on_gpu = facts.get("observed.clock") == "cuda"
    where = if_recorded(_gpu, facts) if is_copy or on_gpu else None
    known = script_interval(timed, facts.trial) if is_copy else interval(timed.rounds_ms)
    return replace(
        step,
        step_ms=timed.step_ms,
        low_ms=known.low if known else None,
        high_ms=known.high if known else None,
        rounds_ms=timed.get("rounds_ms", ()),
        peak_gib=timed.get("peak_gib"),
        measured_on=where or ("the GPU" if on_gpu else "the host's clock"),
        on_cpu=timed_on_cpu(facts) if is_copy else facts.get("observed.clock") == "host",
        predicted=is_copy and bool(facts.get("trial.blocks")),
    )


def cpu_times(*steps: TimedStep) -> str:
    """Name the steps that a CPU took, which say nothing about FP8; empty if none."""
    names = " and ".join(step.name for step in steps if step.on_cpu and step.step_ms)
    return f"the times of {names} come from a CPU and do not apply to FP8 on a GPU" if names else ""


def cautions(facts: Facts, step: TimedStep) -> Iterator[str]:
    """Say what keeps the time of a report from being that of a step."""
    copy, compiled = as_is(facts), facts.get("observed.compiled") and facts.observed.steps_ms
    if (compiled and step.rounds_ms == compiled) or (copy and why_of(copy) is Reason.STILL_COMPILING):
        yield f"the timing of {step.name} contained compilation"
    if step.step_ms and facts.get("trial.reliable") is False:
        yield f"the timing of {step.name} is unreliable: {facts.trial.reason or 'no reason given'}"


def unlike(first: Facts, second: Facts) -> Iterator[tuple[str, str, str]]:
    """Name the differences that should not be, with both values."""
    for name, read in _COMPARED.items():
        one, other = (if_recorded(read, facts) for facts in (first, second))
        if one and other and one != other:
            yield name, one, other


SAME_JOB = ("GPU", "model", "batch")
"""Differences after which two times say nothing about each other."""


def unknown_of_job(*jobs: Facts) -> list[str]:
    """Name the parts of `SAME_JOB` that one of these jobs does not record."""
    return [name for name in SAME_JOB if not all(if_recorded(_COMPARED[name], each) for each in jobs)]


def _gpu(facts: Facts) -> str:
    if recorded(facts, "trial"):
        return str(facts.trial.get("gpu") or facts.trial.get("device", "an unknown device"))
    visible = {gpu.name for gpu in facts.gpus if gpu.get("visible", True)}
    return visible.pop() if len(visible) == 1 else ""


def _model(facts: Facts) -> str:
    blocks = sum(each.count for each in facts.blocks())
    parameters = f"{facts.network.parameters:,} parameters"
    return f"{parameters} in {plural(blocks, 'block')}" if blocks else parameters


def _batch(facts: Facts) -> str:
    work = facts.workload
    size = work.get("batch_size")
    length = work.get("sequence_length")
    shape = f"{size} x {length}" if size and length else f"{work.tokens} rows"
    return f"{shape}, {micro_batches(facts)} a step" if micro_batches(facts) > 1 else shape


def _version(facts: Facts, package: str) -> str:
    found = facts.software.packages.get(package)
    return (found and found.get("version")) or ""


_COMPARED: dict[str, Callable[[Facts], str]] = {
    "GPU": _gpu,
    "model": _model,
    "batch": _batch,
    "processes": lambda facts: str(
        facts.training.distributed.world_size if facts.training.distributed else 1
    ),
    "torch": lambda facts: facts.software.torch or "",
    "CUDA": lambda facts: facts.software.cuda or "",
    "driver": lambda facts: facts.software.driver or "",
    "torchao": lambda facts: _version(facts, "torchao"),
    "Transformer Engine": lambda facts: _version(facts, "transformer_engine"),
    "Triton": lambda facts: facts.software.triton or "",
}
"""Properties that two jobs should share -> how to read them; empty if unknown."""
