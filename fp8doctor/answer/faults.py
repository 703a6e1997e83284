"""What comes before speed: a job that stops, raises, does not learn, does not fit, or does not run in FP8."""

from collections.abc import Iterator, Sequence

from msgspec import Struct

from fp8doctor.analysis.arms import uses_fp8
from fp8doctor.analysis.fp8_request import configured, converted_nothing, fp8_was_asked_for
from fp8doctor.analysis.memory import fit
from fp8doctor.analysis.own_step import finite_steps
from fp8doctor.answer.verdict import BROKEN, Status, own_step_failed
from fp8doctor.diagnosis.engagement import why_fp8_does_not_run
from fp8doctor.facts import Facts, if_recorded, recorded
from fp8doctor.finding import Finding
from fp8doctor.known_errors import in_a_sentence

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
