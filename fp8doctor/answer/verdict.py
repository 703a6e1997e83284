"""The verdict as a record of the JSON, and what comes before speed: a job that stops, raises, does not learn,
does not fit, or does not run in FP8."""

from collections.abc import Iterator, Sequence
from typing import Literal

from msgspec import Struct

from fp8doctor import registry
from fp8doctor.analysis.arms import uses_fp8
from fp8doctor.analysis.fp8_request import configured, converted_nothing, fp8_was_asked_for
from fp8doctor.analysis.layers import computes_forward_in_fp8, nothing_to_convert, stores_fp8
from fp8doctor.analysis.memory import fit
from fp8doctor.analysis.own_step import finite_steps, outside_autocast, ran_in_fp8
from fp8doctor.facts import Facts, Prose, Record, Unrecorded, if_recorded, recorded
from fp8doctor.facts.arm_names import OWN_STEP_FAILED
from fp8doctor.facts.no_number import why_of
from fp8doctor.finding import Basis, Breaks, Finding
from fp8doctor.known_errors import in_a_sentence
from fp8doctor.wording import plural

Status = Literal[
    "step_raises",
    "layers_do_not_learn",
    "does_not_fit",
    "not_finite",
    "fp8_not_engaged",
    "no_fp8",
    "fp8_slower",
    "fp8_even",
    "fp8_faster",
    "open",
]
"""The gravest first. ``open``: nothing tells whether FP8 or BF16 is faster."""

GRAVE: tuple[Status, ...] = ("step_raises", "layers_do_not_learn", "not_finite", "fp8_not_engaged")
"""Answers that count as errors whatever the severity of the findings; so does a measured ``fp8_slower``."""

BROKEN: dict[Breaks, str] = {
    "step_raises": "The training step will raise",
    "layers_do_not_learn": "Layers do not learn",
    "not_finite": "The loss is not finite",
}
"""First words of an answer about more than speed, the most severe first."""


class Open(Record, frozen=True, kw_only=True):
    """A question without an answer, and the command that answers it."""

    what: str
    command: str = ""
    """Empty if no command of fp8doctor helps."""


class Verdict(Record, frozen=True, kw_only=True):
    """The answer of the JSON. ``speedup`` is best BF16 / as it is. All times are of one clock."""

    status: Status
    summary: Prose
    speedup: float | None = None
    speedup_low: float | None = None
    speedup_high: float | None = None
    basis: Basis | None = None
    achievable_speedup: float | None = None
    """What FP8 would give a job without it."""
    estimated_speedup: float | None = None
    """Best BF16 / as it is by the cost model, on the report's ``modelled_gpu``; None if a GPU timed both, or
    the cost model has no numbers."""
    step_ms: float | None = None
    bf16_step_ms: float | None = None
    best_step_ms: float | None = None
    """The step with the plan, for as many tokens as now."""
    best_variant: str | None = None
    """Its name, as in the facts of a trial; ``planned`` for an estimate."""
    best_basis: Basis | None = None
    tokens_per_s: float | None = None
    """Of ``step_ms``."""
    whole_step_low: float | None = None
    whole_step_high: float | None = None
    """Bounds of the speedup of a whole step on several GPUs, with its communication, estimated; None if the
    timed copies are the whole step, and for the lower one if the upper one is all that is known."""
    open: tuple[Open, ...] = ()
    """What could change the verdict or the plan."""


def own_step_failed(facts: Facts) -> bool:
    """Return whether the user's own step raised when it was to be timed. One that was watched runs: a copy
    of it raised."""
    watched = recorded(facts, "observed")
    return recorded(facts, "trial") and not watched and why_of(facts.trial) in OWN_STEP_FAILED


ASKS = (fp8_was_asked_for, configured, converted_nothing)
"""Ways to see that FP8 was asked for."""

KEEPS_FP8_OUT = ("environment", "engagement")
"""Areas in which an error is the reason why a job that asked for FP8 holds no FP8 layer."""


class Fault(Struct, frozen=True):
    """What matters more than speed. ``status`` is ``open`` if the verdict has no word for it."""

    status: Status
    title: str
    reason: str = ""
    finding: Finding | None = None
    """The check's finding, if one says it."""
    was_seen: bool = False
    """True if it happened when the job ran; False if it was read from the job."""
    first: str = ""
    """What to do before any fix, of a fault that no check explains."""


def fault_of(facts: Facts, findings: Sequence[Finding]) -> Fault | None:
    """Return the gravest fault; None if nothing comes before speed."""
    return next(_faults(facts, findings), None)


def _faults(facts: Facts, findings: Sequence[Finding]) -> Iterator[Fault]:
    errors = [each for each in findings if each.severity == "error"]
    engagement = next((each for each in errors if each.area in KEEPS_FP8_OUT), None)
    broken = {each.breaks: each for each in reversed(findings) if recorded(each, "breaks")}
    no_model = facts.get("gaps", {}).get("network", "")
    ended = dict[str, str]()
    if error := facts.get("script_error"):
        ended[FAILED_EARLY] = _explained(error)
    elif FAILED_EARLY.lower() == no_model.lower():
        ended[FAILED_EARLY] = "The exception is in the script's output"
    for end in ("raised", "killed"):
        for each in (rank for rank in facts.get("ranks.processes", ()) if rank.get("end") == end):
            ended[f"Rank {each.get('rank', '?')} ended early"] = _explained(each.get("error") or UNSEEN)
    yield from (Fault("open", title, why, was_seen=True, first=FIRST) for title, why in ended.items())
    if not recorded(facts, "network"):
        yield Fault("open", "No model was examined", no_model)
        return
    if own_step_failed(facts):
        reason, first = _explained(facts.get("trial.reason") or ""), next(iter(errors), None)
        yield Fault("step_raises", "The training step raises", reason, first, was_seen=True)
    if refused := facts.get("workload.refused"):
        yield Fault("step_raises", BROKEN["step_raises"], refused)
    for status in ("step_raises", "layers_do_not_learn"):
        if found := broken.get(status):
            yield Fault(status, BROKEN[status], found.title, found)
    memory = if_recorded(fit, facts)
    if memory and memory.is_too_large:
        yield Fault("does_not_fit", "It does not fit into the GPU's memory (estimated)", memory.sentence)
    if told := if_recorded(non_finite, facts):
        names = " and ".join(finite_steps(facts).now or ())
        title = BROKEN["not_finite"] if "loss" in names else f"The {names} are not finite"
        yield Fault("not_finite", title, told, broken.get("not_finite"), was_seen=True)
    if if_recorded(uses_fp8, facts):
        if why := if_recorded(why_fp8_does_not_run, facts):
            why = why.removeprefix("FP8 does not run: ")
            yield Fault("fp8_not_engaged", "FP8 does not run", why, engagement)
    elif engagement and any(if_recorded(each, facts) for each in ASKS):
        yield Fault("fp8_not_engaged", "FP8 does not run", engagement.title, engagement)


FAILED_EARLY = "The script failed before its first step"
FIRST = "Solve what ended the job first"
UNSEEN = "A signal, a crash in native code or os._exit: it left no exception"


def _explained(error: str) -> str:
    """Add the cause of an exception to its words if the message is a known one."""
    known = in_a_sentence(error)
    return f"{error.rstrip('.')}.{f' {known}' if known else ''}"


def non_finite(facts: Facts) -> str:
    """Say which of the job's own steps is not finite, and whether BF16 is; empty if none was seen."""
    seen = finite_steps(facts)
    if not seen.now:
        return ""
    bf16 = {True: "BF16 is finite", False: "in BF16 too", None: "BF16 was not looked at"}[seen.bf16]
    return f"NaN or infinity in the {' and '.join(seen.now)}; {bf16}"


def why_not_engaged(facts: Facts) -> str:
    """Say why no layer trains in FP8, or why that is unknown; empty if one does."""
    if not recorded(facts, "network"):
        return "No model was examined, so fp8doctor cannot tell whether FP8 is engaged."
    try:
        if uses_fp8(facts):
            if not (why := why_fp8_does_not_run(facts)) and ran_in_fp8(facts) is None:
                outside_autocast(facts)
            return why
        took = ": the filter of the conversion took none" if converted_nothing(facts) else ""
        count = plural(len(facts.network.linears), "Linear")
        state = without_fp8(facts)[0] or f"No layer of this model trains in FP8 (0 of {count}{took})"
        return f"{state}. To convert it, see 'fp8doctor explain MOD001'."
    except Unrecorded as missing:
        gap = str(facts.get("gaps", {}).get("training.fp8_autocast", "")).rstrip(".")
        return f"fp8doctor cannot tell whether FP8 is engaged: {gap or missing}."


def why_fp8_does_not_run(facts: Facts) -> str:
    """Say what prevents every FP8 layer from running in FP8; empty if unknown."""
    in_fp8, ran = facts.network.fp8, ran_in_fp8(facts)
    if facts.network.get("trainable_parameters") == 0:
        return "FP8 trains nothing: no parameter is trained."
    if all(linear.get("engaged") is False for linear in in_fp8):
        return f"FP8 does not run: all {len(in_fp8)} FP8 layers ran their last training forward in BF16."
    if ran is False:
        return "FP8 is set up and does not run: no FP8 matmul was seen in a training step."
    if ran is None and if_recorded(outside_autocast, facts):
        return f"FP8 does not run: the training step opens no FP8 autocast around {len(in_fp8)} FP8 layers."
    return ""


def without_fp8(facts: Facts) -> tuple[str, bool]:
    """Say what a model has in place of FP8 layers, and whether FP8 may run all the same, at unknown speed.

    The words are empty for plain BF16.
    """
    linears = facts.network.linears
    if uses_fp8(facts):
        return "", False
    forward = sum(map(computes_forward_in_fp8, linears))
    stored, named = (sum(each.use == use for each in linears) for use in ("storage", "unknown"))
    calls, ran = facts.network.get("fp8_calls", ()), facts.get("observed.fp8_gemms")
    unread = facts.get("gaps", {}).get("network.linears", "").rstrip(".") if not linears else ""
    kind, of = "FP8" if any(map(stores_fp8, linears)) else "low precision", f"of {len(linears)} Linears"
    states = (
        (forward, f"No FP8 training: {forward} {of} multiply in FP8 in the forward only", False),
        (unread, f"Its Linears could not be read: {unread}", True),
        (named, f"FP8 of no known library in {named} {of}: whether it runs was not seen", True),
        (calls, f"FP8 is outside of layers: the code calls {''.join(calls[:1])}", True),
        (ran, f"{ran} FP8 matmuls ran in a step, and no layer of a known FP8 library was found", True),
        (stored, f"No FP8 training: {stored} {of} only store their weights in {kind}", False),
        (
            if_recorded(nothing_to_convert, facts.network),
            "FP8 takes none of its layers: train in BF16",
            False,
        ),
    )
    return next(((words, unclear) for holds, words, unclear in states if holds), ("", False))


def invalidates(finding: Finding) -> bool:
    """Return whether a finding says that the modelled step is not the one that runs.

    Compile marks without effect do not count if the facts call no layer compiled.
    """
    if finding.get("breaks") == "step_raises":
        return True
    check = registry.check_of(finding)
    seems = finding.severity == "info" or finding.evidence.get("examined_as_uncompiled") is True
    return check is not None and check.invalidates_model and not seems
