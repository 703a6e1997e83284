"""Two saved reports compared: both steps, their ratio, its parts, and what differs between the jobs."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from msgspec.structs import replace

from fp8doctor.analysis.arms import as_shown, ratio_apart, timed_on_cpu
from fp8doctor.analysis.layers import tokens_of
from fp8doctor.analysis.noise import script_interval
from fp8doctor.analysis.own_step import as_is, watched
from fp8doctor.analysis.significance import Number, interval
from fp8doctor.analysis.step_difference import Waterfall, parts_in_words, signed, waterfall
from fp8doctor.cost.matmuls import micro_batches
from fp8doctor.diagnosis.document import SCHEMA_VERSION, Document, Tool, tool
from fp8doctor.facts import Facts, Package, if_recorded, recorded
from fp8doctor.facts.arm_names import Reason
from fp8doctor.facts.no_number import why_of
from fp8doctor.facts.record import Record, encode, to_builtins
from fp8doctor.wording import capital, labels, plural, times


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
    missing: str = ""
    """Why there is no time; empty if there is one."""
    estimated_ms: float | None = None
    """If there is none."""
    estimated_for: str = ""
    """The GPU of the estimate."""

    @property
    def tokens_per_s(self) -> float | None:
        return self.tokens * 1e3 / self.step_ms if self.step_ms and self.tokens else None


class Unlike(Record, frozen=True, kw_only=True):
    """A difference between the two jobs that makes a ratio of their times unfair."""

    what: str
    first: str
    second: str


class Comparison(Record, frozen=True, kw_only=True):
    """Two reports."""

    tool: Tool
    files: tuple[str, str]
    """Names without their folders."""
    steps: tuple[TimedStep, TimedStep]
    speedup: Number | None
    """Time of the first / time of the second, with the interval that both of theirs allow."""
    difference: Waterfall | None
    """The second less the first."""
    unlike: tuple[Unlike, ...]
    cautions: tuple[str, ...]
    """Reasons why a time is not that of a step: compilation, a CPU, unreliable timing."""
    appeared: tuple[str, ...]
    """Codes of findings, mere information aside, that only the second report has."""
    gone: tuple[str, ...]
    """Codes that only the first has."""
    summary: str

    def to_json(self) -> str:
        data: dict[str, Any] = {"schema_version": SCHEMA_VERSION, "kind": "comparison", **to_builtins(self)}
        return encode(data).decode()


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
    )


def _with_estimate(step: TimedStep, document: Document) -> TimedStep:
    """Add what the report estimates of a step that was not timed."""
    compared = document.answer.compared if document.answer and not step.step_ms else None
    if compared is None or compared.now is None:
        return step
    return replace(step, estimated_ms=compared.now.ms.value, estimated_for=compared.gpu)


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


def unlike(first: Facts, second: Facts) -> Iterator[Unlike]:
    """Name the differences that should not be, with both values."""
    for name, read in _COMPARED.items():
        one, other = (if_recorded(read, facts) for facts in (first, second))
        if one and other and one != other:
            yield Unlike(what=name, first=one, second=other)


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
    work, count = facts.workload, micro_batches(facts)
    size, length = work.get("batch_size"), work.get("sequence_length")
    shape = f"{size} x {length}" if size and length else f"{work.tokens} rows"
    shape = shape if work.tokens else f"{size} samples" if size else ""
    return f"{shape}, {count} a step" if shape and count > 1 else shape


def _version(of: str, facts: Facts) -> str:
    """Read the version of a package by its name, or of other software by the path of the fact."""
    return (facts.get(of) if "." in of else facts.packages().get(of, Package()).get("version")) or ""


_COMPARED: dict[str, Callable[[Facts], str]] = {
    "GPU": _gpu,
    "model": _model,
    "batch": _batch,
    "processes": lambda facts: str(
        facts.training.distributed.world_size if facts.training.distributed else 1
    ),
    **{
        words: partial(_version, of)
        for words, of in {
            "torch": "software.torch",
            "CUDA": "software.cuda",
            "driver": "software.driver",
            "torchao": "torchao",
            "Transformer Engine": "transformer_engine",
            "Triton": "software.triton",
        }.items()
    },
}
"""Properties that two jobs should share -> how to read them; empty if unknown."""


def compared(first: Document, second: Document, files: tuple[str, str]) -> Comparison:
    """Compare the steps of two reports, which were saved as ``files``."""
    documents = first, second
    one, other = (
        _with_estimate(timed_step(each.facts, name), each)
        for each, name in zip(documents, labels(*files), strict=True)
    )
    speedup = _speedup(one, other)
    arms = [None if timed_on_cpu(each.facts) else as_is(each.facts) for each in documents]
    timed = one.step_ms is not None and other.step_ms is not None
    difference = if_recorded(waterfall, arms[1], arms[0]) if timed and arms[0] and arms[1] else None
    differing = tuple(unlike(first.facts, second.facts))
    codes = [[each.code for each in of.findings if each.severity != "info"] for of in documents]
    return Comparison(
        tool=tool(),
        files=files,
        steps=(one, other),
        speedup=speedup,
        difference=difference,
        unlike=differing,
        cautions=(*cautions(first.facts, one), *cautions(second.facts, other)),
        appeared=tuple(code for code in codes[1] if code not in codes[0]),
        gone=tuple(code for code in codes[0] if code not in codes[1]),
        summary=_summary(one, other, speedup, difference, differing),
    )


def _speedup(one: TimedStep, other: TimedStep) -> Number | None:
    """Divide the times of two steps; None without rounds of both."""
    if not one.rounds_ms or not other.rounds_ms:
        return None
    return as_shown(ratio_apart(one.rounds_ms, other.rounds_ms), one.step_ms, other.step_ms)


def _summary(
    one: TimedStep,
    other: TimedStep,
    speedup: Number | None,
    difference: Waterfall | None,
    differing: tuple[Unlike, ...],
) -> str:
    things = ", ".join(each.what for each in differing)
    unfair = f" That is a ratio of unlike things: {things} differ." if things else ""
    if not one.step_ms or not other.step_ms:
        untimed = [f"{step.name} has no time: {step.missing}" for step in (one, other) if not step.step_ms]
        if not one.estimated_ms or not other.estimated_ms:
            return f"Nothing can be compared: {'; '.join(untimed)}."
        gpus = " and ".join(dict.fromkeys(each.estimated_for for each in (one, other)))
        both = f"{other.name} takes {other.estimated_ms:,.1f} ms/step, {one.name} {one.estimated_ms:,.1f}"
        ratio = times(one.estimated_ms, other.estimated_ms)
        return f"Nothing was timed. Estimated for {gpus}: {both}: {ratio} of its speed.{unfair}"
    faster = times(one.step_ms, other.step_ms)
    if on_cpu := cpu_times(one, other):
        ratio, unfair = on_cpu, ""
    elif speedup is None:
        ratio = f"{faster} of its speed, how surely is not known (no rounds)"
    elif speedup.low <= 1 <= speedup.high:
        ratio = f"too close to tell apart ({speedup.low:.2f}x to {speedup.high:.2f}x)"
    else:
        ratio = f"{faster} of its speed ({speedup.low:.2f}x to {speedup.high:.2f}x)"
    both = f"{capital(other.name)} takes {other.step_ms:,.1f} ms/step, {one.name} {one.step_ms:,.1f}"
    parts = f" {signed(difference.difference_ms)} ms = {parts_in_words(difference)}." if difference else ""
    return f"{both}: {ratio}.{unfair}{parts}"


def regression(baseline: Facts, facts: Facts, name: str, most_pct: float) -> str | None:
    """Say why a step misses the baseline saved as ``name``. At most ``most_pct`` longer is none."""
    one, other = timed_step(baseline, name), timed_step(facts, "the step")
    if not one.step_ms or not other.step_ms:
        return f"no step was timed to compare with {name}: {other.missing}"
    if on_cpu := cpu_times(one, other):
        return on_cpu
    longer_pct = 100 * (other.step_ms / one.step_ms - 1)
    speedup = _speedup(one, other)
    allowed_ms = one.step_ms * most_pct / 100
    if other.step_ms - one.step_ms <= allowed_ms or (speedup and speedup.high >= 1):
        return None
    things = ", ".join(each.what for each in unlike(baseline, facts))
    return (
        f"the step takes {other.step_ms:,.1f} ms, {longer_pct:.1f}% more than the {one.step_ms:,.1f} ms of "
        f"{name}{f', of which differ: {things}' if things else ''}"
    )
