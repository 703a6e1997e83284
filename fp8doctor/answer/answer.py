"""The answer of a report: what comes before speed, the steps compared, causes, fixes, and what is open."""

import math
from collections.abc import Iterator, Sequence

from msgspec import Struct
from msgspec.structs import replace

from fp8doctor.analysis.arms import uses_fp8
from fp8doctor.analysis.fp8_request import trains_in_16_bits, under_unsloth
from fp8doctor.analysis.layers import nothing_to_convert, tokens_of, waits_for_linears
from fp8doctor.analysis.memory import USABLE, Fit, fit
from fp8doctor.analysis.modelled_speedup import TAKES_NONE
from fp8doctor.analysis.noise import BUSY_HOST, busy_host, disturbances
from fp8doctor.analysis.own_step import as_is, compiles_any
from fp8doctor.analysis.recipe_support import assumed_gpus, visible_gpus
from fp8doctor.analysis.recipe_support import has_fp8 as has_fp8_cores
from fp8doctor.analysis.significance import EVEN, Number, Side
from fp8doctor.analysis.step_difference import REST, SHOWN_MS, UNEXPLAINED
from fp8doctor.analysis.treatment_table import STAY_IN_BF16
from fp8doctor.analysis.trial_view import TrialView
from fp8doctor.analysis.watched import copy_overhead, timed_alone, whole_speedup
from fp8doctor.answer.causes import Cause, causes
from fp8doctor.answer.commands import run_again, timed, with_more_time
from fp8doctor.answer.comparison import Comparison, comparison, with_its_gain
from fp8doctor.answer.faults import Fault, fault_of
from fp8doctor.answer.items import AREAS, Item, items
from fp8doctor.answer.steps import Steps, timed_steps
from fp8doctor.answer.verdict import Open, Status, Verdict
from fp8doctor.cost.matmul_counts import micro_batches
from fp8doctor.diagnosis.document import Step
from fp8doctor.diagnosis.engagement import without_fp8
from fp8doctor.diagnosis.estimate import Expected, compiles
from fp8doctor.facts import Arm, Facts, if_recorded, recorded
from fp8doctor.facts.arm_names import ArmName
from fp8doctor.finding import Basis, Finding, Outcome, Saving
from fp8doctor.recipes import low_precision

MOST_CAUSES = 2
"""Causes that are named; of a fault that a check found its reason alone."""

PART_SHARE = 0.3
"""Part / the largest, from which more than two parts are named, or more than one with two causes."""


class Answer(Struct, frozen=True):
    """Everything that a screen, a page, a gate or an agent needs; what is not known is None or empty."""

    status: Status
    has_fp8: bool
    """True if layers train in `low_precision`."""
    compared: Comparison
    low_precision: str = "FP8"
    """The job's format as people call it: FP8, MXFP8 or NVFP4."""
    fault: Fault | None = None
    state: str = ""
    """What a model without FP8 layers has in their place."""
    causes: tuple[Cause, ...] = ()
    fixes: tuple[Step, ...] = ()
    items: tuple[Item, ...] = ()
    """The fixes and the other findings, explained."""
    memory: Fit | None = None
    whole: tuple[float, float] | None = None
    """Bounds of the whole step's speedup if copies without communication were timed; 0 if one is unknown."""
    is_compute: bool = False
    """True if the compared steps lack communication that the job has."""
    doubts: tuple[str, ...] = ()
    open: tuple[Open, ...] = ()
    unknown: str = ""
    """Why there is no speedup."""
    takes_no_fp8: bool = False
    """True if no conversion gives this model FP8."""
    is_decided: bool = False
    """True if the plan leaves FP8 off and FP8 has little to gain here, so that no other variant matters."""
    steps: Steps | None = None
    """The timed variants."""
    is_cut: bool = False
    """True if models of fewer blocks were timed, and the whole step is the line through their times."""
    unchecked: tuple[str, ...] = ()
    """What may slow an estimated step down and could not be checked."""

    @property
    def speedup(self) -> Number | None:
        return self.compared.speedup

    @property
    def basis(self) -> Basis | None:
        """Say how the speedup is known, else the step; a fault is measured or known by a rule."""
        known = self.speedup or (self.compared.now.ms if self.compared.now else None)
        if self.fault is None:
            return known.basis if known else None
        return "measured" if self.fault.was_seen or (known and known.basis == "measured") else "rule"

    @property
    def parts_ms(self) -> dict[str, float]:
        """The largest parts of the difference of FP8 and BF16, the largest first, and a small rest."""
        every, few = self.compared.parts_ms, 2 - bool(self.causes[1:])
        parts = {name: abs(ms) for name, ms in every.items() if name != REST and abs(ms) >= SHOWN_MS}
        names = sorted(parts, key=lambda name: -parts[name])
        names = names[:few] + [each for each in names[few:] if parts[each] >= PART_SHARE * parts[names[0]]]
        told = {name: every[name] for name in names}
        rest = sum(every.values()) - sum(told.values())
        return told | ({REST: rest} if told and abs(rest) >= SHOWN_MS else {})

    @property
    def dearest(self) -> str:
        """Name the part that FP8 adds most to if it is slower and no cause is named; else empty."""
        found, parts = self.speedup, self.compared.parts_ms
        unnamed = found is not None and found.side == "slower" and self.shows_parts and not self.causes
        largest = max(parts, key=parts.__getitem__) if unnamed else ""
        return "" if largest in (REST, UNEXPLAINED) else largest

    @property
    def saves_matmuls(self) -> bool:
        """Return whether FP8's matmuls take less time than those of BF16."""
        return self.compared.parts_ms.get("GEMMs", 0.0) < 0

    @property
    def why_unknown(self) -> str:
        """Say why there is no speedup, or why nothing explains the one that was timed; else empty."""
        timed = self.speedup is not None and self.speedup.basis == "measured"
        if timed and not (self.causes or self.parts_ms or self.state):
            return "these steps have no comparable profiles"
        return "" if self.compared.end_speedup else self.unknown

    @property
    def ends_finite(self) -> bool:
        """Return whether a loss that is not finite was timed as finite with the plan."""
        end = self.compared.end
        return (
            self.status == "not_finite" and end is not None and bool(end.arm.get("tried")) and end.is_finite
        )

    @property
    def notices(self) -> tuple[Item, ...]:
        """Return the findings that ask for attention and are neither a cause nor the head of a fix."""
        told = {each.name for each in self.causes}
        beside = (each for each in self.items if each.number is None and not each.is_note)
        return tuple(each for each in beside if each.name not in told)

    @property
    def codes_beside(self) -> tuple[str, ...]:
        """Return the codes that a job without a plan is referred to: of its warnings, else of its causes."""
        settled = not (self.unchecked or self.open)
        warned = (each.code for each in self.notices if settled and each.mark in ("warning", "bad"))
        return (*warned,) or tuple(each.code for each in self.causes if each.code)

    @property
    def whole_bounds(self) -> Number | None:
        """Return the whole step's speedup, `low` 0 if only its most is known; None if bounds tell nothing."""
        low, high = self.whole or (0.0, math.inf)
        known = Number((low + high) / 2, low, high, "modelled")
        if low:
            tells = known.side != "open" or not known.has_open_size
        else:
            tells = self.speedup is not None and high < self.speedup.value - 0.005  # as both are shown
        return known if tells else None

    @property
    def lacks_whole(self) -> bool:
        """Return whether copies alone were compared, and nothing bounds the whole step."""
        return self.is_compute and self.whole is None and self.compared.timed

    @property
    def shows_parts(self) -> bool:
        """Return whether the parts explain: not if a fault leaves an estimate of a step that does not run."""
        runs = self.fault is None or self.status == "open" or self.compared.timed
        return bool(self.parts_ms and self.speedup and not self.state and runs)

    @property
    def timed_fixes(self) -> tuple[int, ...]:
        """Number the fixes that make the plan's end if others of the plan were not timed; else empty."""
        late, every = _untimed(self.fixes), range(1, len(self.fixes) + 1)
        return () if self.leaves_fp8 or not late else tuple(each for each in every if each not in late)

    @property
    def largest_saving(self) -> tuple[int, Saving] | None:
        """Return the fix with the largest saving by its number, and that saving; None without one."""
        known = [(at, each.saving_ms) for at, each in enumerate(self.fixes, 1) if each.saving_ms]
        return max(
            (each for each in known if each[1].middle > 0), key=lambda each: each[1].middle, default=None
        )

    @property
    def leaves_fp8(self) -> bool:
        """Return whether the plan leaves FP8 off."""
        return any(step.treatment.name == STAY_IN_BF16 for step in self.fixes)

    @property
    def fits_in_gib(self) -> float | None:
        """Return the estimated peak with the fixes that make the job fit; None if they are not enough."""
        peaks = [step.peak_gib for step in self.fixes if recorded(step, "peak_gib")]
        return peaks[-1] if self.memory and peaks and peaks[-1] <= USABLE * self.memory.gpu_gib else None

    @property
    def is_settled(self) -> bool:
        """Return whether no time would change the answer: the job does not fit, nothing takes FP8 and no fix
        is known, or the estimate is sure of its side, its size and the plan's end."""
        found, later = self.speedup, self.compared.end_speedup
        if self.fault and (self.status == "does_not_fit" or not (self.fault.finding or self.fault.first)):
            return True
        if self.status in ("step_raises", "fp8_not_engaged"):
            return later.side != "open" if later else self.status == "fp8_not_engaged"
        ends = not self.fixes or (self.compared.end is not None and (later is None or later.side != "open"))
        if found is None:
            return self.takes_no_fp8 and not _untimed(self.fixes)
        return ends and found.side in ("slower", "faster") and not found.has_open_size

    @property
    def command(self) -> str:
        """Return the command that answers the first open question."""
        return next((each.command for each in self.open if each.command), "")


def answer(
    view: TrialView,
    findings: Sequence[Finding],
    steps: Sequence[Step],
    outcomes: Sequence[Outcome],
    expected: Expected,
) -> Answer:
    """Answer for a job whose plan is ``steps`` and whose user wants to see ``findings``."""
    facts = view.facts
    known = recorded(facts, "network")
    compared = comparison(view, expected, steps) if known else Comparison()
    steps, speedup = with_its_gain(steps, compared), compared.speedup
    errors = [each for each in findings if each.severity == "error"]
    fault = fault_of(facts, findings)
    if fault is None and errors and speedup is None:
        why = errors[0].explanation.partition(". ")[0].rstrip(".")
        fault = Fault("open", errors[0].title.rstrip("."), why, errors[0])
    has_fp8 = bool(known and if_recorded(uses_fp8, facts))
    state, is_unclear = (if_recorded(without_fp8, facts) if known else None) or ("", False)
    if fault:
        status = fault.status
    elif is_unclear:
        status = "open"
    else:
        status = SIDES[speedup.side if speedup else "open"] if has_fp8 else "no_fp8"
    named = tuple(causes(view, findings, steps, fault, state, speedup))
    if fault and (fault.finding or fault.first):  # nothing else matters but what ends the job too
        ends = {each.name for each in findings if recorded(each, "breaks")}
        named = (*named[:1], *(each for each in named[1:] if each.name in ends))
    gpus = if_recorded(assumed_gpus, facts) or visible_gpus(facts)
    nothing = known and (
        if_recorded(nothing_to_convert, facts.network)
        or (view.takes_no_conversion and not if_recorded(waits_for_linears, facts))
        or if_recorded(trains_in_16_bits, facts)
        or (gpus and not any(if_recorded(has_fp8_cores, each) for each in gpus))
    )
    bf16_ms = compared.bf16.ms.value if compared.bf16 else None
    memory = if_recorded(fit, facts) if known else None
    said = Answer(
        status=status,
        has_fp8=has_fp8,
        compared=compared,
        low_precision=low_precision(facts.linears()),
        fault=fault,
        state=state,
        causes=named[:MOST_CAUSES],
        fixes=tuple(steps),
        items=tuple(items(view, findings, steps, {each.name for each in named[:MOST_CAUSES]})),
        memory=memory,
        whole=if_recorded(whole_speedup, facts, speedup, bf16_ms, has_fp8=has_fp8),
        is_compute=view.on_gpu and bool(if_recorded(timed_alone, facts)),
        doubts=tuple(_doubts(view)) if view.on_gpu else (),
        unknown="" if speedup or fault or state or not known else _unknown(view, expected, compared.after),
        takes_no_fp8=not has_fp8 and bool(nothing),
        is_decided=view.is_decided,
        steps=if_recorded(timed_steps, view),
        is_cut=bool(view.table and facts.get("trial.blocks")),
        unchecked=_unchecked(outcomes) if speedup and speedup.basis != "measured" else (),
    )
    return replace(said, open=_open(view, said)) if known else said


SIDES: dict[Side, Status] = {
    "slower": "fp8_slower",
    "even": "fp8_even",
    "faster": "fp8_faster",
    "open": "open",
}

SLOWS = ("engagement", "shapes", "compilation", "checkpointing", "distributed", "step")
"""Areas of checks that find what makes a step slow."""


def _unchecked(outcomes: Sequence[Outcome]) -> tuple[str, ...]:
    areas = {each.area for each in outcomes if each.outcome == "unknown"}
    return tuple(AREAS.get(each, each) for each in SLOWS if each in areas)


def _unknown(view: TrialView, expected: Expected, after: str) -> str:
    """Say why there is no speedup, timed or estimated."""
    tried = [each for each in view.facts.arms() if each.get("tried")]
    untimed = None if view.as_is else as_is(view.facts)
    nothing = view.trial.get("reason") if view.on_gpu and not tried else None
    if why := (untimed and untimed.get("reason")) or nothing:
        return f"the step was not timed: {why.rstrip('.')}"
    if view.takes_no_conversion:
        return TAKES_NONE
    if view.late_bf16 or view.late_fp8:
        return ""  # what has to be timed first is open
    return f"only the step {after} can be estimated" if after else expected.why_not


def _doubts(view: TrialView) -> Iterator[str]:
    """Say in a few words what may have changed the times; the notes below the table say how much.

    Also a host that was busy enough to leave open how FP8 compares, as it runs or at its best.
    """
    found, trial = disturbances(view.trial), view.trial
    yield from found
    pairs = ((view.bf16, view.as_is), (view.fair_bf16(view.fp8), view.fp8))
    unsure = (
        busy_host(trial, (bf16.arm, fp8.arm), 100 * EVEN)
        for bf16, fp8 in pairs
        if bf16 and fp8 and view.speed(fp8, bf16).side == "open"
    )
    if not found and any(unsure):
        yield BUSY_HOST
    if view.facts.get("training.layerdrop"):
        yield "LayerDrop skips layers at random"
    if if_recorded(copy_overhead, view.facts):
        yield "the copy is slower than your step"


def _open(view: TrialView, said: Answer) -> tuple[Open, ...]:
    """Say what could change the verdict or the plan, the gravest alone, with its command."""
    facts, speedup, whole = view.facts, said.speedup, said.whole
    gpus = visible_gpus(facts)
    live = LIVE if gpus else f"{LIVE} on a GPU"
    again, time_it = run_again(facts) or "", with_more_time(facts) or timed(facts) or live
    measured = speedup is not None and speedup.basis == "measured"
    is_slower = measured and speedup is not None and speedup.high < 1
    low = said.low_precision
    other = "BF16" if said.has_fp8 else low
    late = _untimed(said.fixes) if measured and not said.leaves_fp8 else {}
    lacked_time = {name for each in view.late.values() for name in each.get("treatments", ())}
    by_hand = any(each.treatment.name not in lacked_time for each in late.values())
    numbers = " and ".join(map(str, late))
    where = "; on a GPU" if gpus == [] and time_it != live and speedup else ""
    untimed = list[str]()
    if not measured and not said.is_settled:
        untimed.append(_not_known(said, speedup))
    settled = measured or said.fault or said.takes_no_fp8 or if_recorded(under_unsloth, facts)
    if not (settled or view.table or compiles_any(facts)):
        untimed += [] if any(map(compiles, said.fixes)) else [UNCOMPILED]

    def untimed_form(*forms: Arm | None) -> str:
        words = next((view.words[each.name] for each in forms if each), "")
        return words and f"{words}{',' * (',' in words)} is untimed"

    bf16 = view.late_bf16 if said.leaves_fp8 or not is_slower else None
    own = bf16 is not None and bf16.name == ArmName.BF16_AS_COMPILED
    decides = untimed_form(
        view.late.get(ArmName.AS_IS),
        bf16 if own else None,
        view.late_fp8 or (None if view.in_fp8 else view.late_first),
        bf16,
        view.late.get(ArmName.BF16_WHOLE) if said.leaves_fp8 or not said.has_fp8 else None,
        None if said.has_fp8 else view.late.get(ArmName.BF16_PRESCRIBED),
    )
    first = untimed_form(None if said.is_decided else view.late_first)
    end = said.compared.end
    lacks_fair_bf16 = measured and said.compared.gain and end and end.in_fp8 and not said.compared.end_speedup
    is_whole_open = said.lacks_whole or (whole and whole[0] < 1 < whole[1])
    copy = as_is(facts)
    needs_run = copy is not None and copy in view.too_large.values() and view.watched is not None
    questions = (
        (decides, decides, time_it),
        (measured and speedup is not None and speedup.side == "open", NOISE, time_it),
        (said.leaves_fp8 and view.fp8_is_undecided, NOISE_AT_END, time_it),
        (is_whole_open, f"the whole step; compare a run in {other}", again),
        (first, first, time_it),
        (lacks_fair_bf16, "BF16 with the same changes was not timed", time_it),
        (late and by_hand, f"apply fix {numbers}, time it", timed(facts) or live),
        (late, f"fix {numbers} was not timed", time_it),
        (untimed and needs_run, f"{', '.join(untimed)}; compare a run in {other}", again),
        (untimed, f"{', '.join(untimed)}{where}", time_it),
        (said.unchecked and not said.fixes and not said.fault, f"other causes need a trial{where}", time_it),
    )
    return next(((Open(what=what, command=command),) for is_open, what, command in questions if is_open), ())


def _not_known(said: Answer, speedup: Number | None) -> str:
    """Say what an estimate, or a job without one, leaves open."""
    if said.fault and (said.fault.first or (said.status == "step_raises" and not said.fixes)):
        return "all else, once that is solved"
    if speedup is None:
        if (said.status == "step_raises" or said.takes_no_fp8) and said.fixes:
            return f"apply {'the fixes' if said.fixes[1:] else 'fix 1'}, time it"
        if said.has_fp8 and said.compared.now is not None:
            return "how fast BF16 is"
        others = said.steps is not None and said.steps.rows and said.has_fp8
        where = "as you run it" if others else f"on {said.compared.gpu or 'a GPU'}"
        return f"how fast {said.low_precision} is {where}"
    if speedup.side in ("open", "even"):
        return "which is faster"
    return f"how much {speedup.side}" if speedup.has_open_size else "the fixes were not timed"


def _untimed(fixes: Sequence[Step]) -> dict[int, Step]:
    """Number the fixes that have no measured saving, alone or together with another."""
    return {
        number: each
        for number, each in enumerate(fixes, 1)
        if not (each.together or (each.saving_ms and each.saving_ms.basis == "measured"))
    }


UNCOMPILED = "torch.compile is untimed"
NOISE = "too noisy to rank; use a quiet machine"
NOISE_AT_END = f"the fastest FP8 and BF16 are {NOISE}"
LIVE = "inspect_model(model, batch)"
"""What times a live model."""


def verdict(said: Answer, facts: Facts, summary: str) -> Verdict:
    """Write the answer as the JSON has it; `speedup` is of the step as it is. All times are of one clock."""
    compared, speedup = said.compared, said.speedup
    now, bf16, end = compared.now, compared.bf16, compared.end
    of_fp8 = speedup if said.has_fp8 else None
    estimated = of_fp8 is not None and of_fp8.basis != "measured" and not compared.after
    gives = compared.end_speedup or (None if said.has_fp8 else speedup)
    low, high = said.whole or (None, None)
    own_ms = now.ms.value if now and now.ms.basis == "measured" else None
    tokens = if_recorded(tokens_of, facts)
    return Verdict(
        status=said.status,
        summary=summary,
        speedup=of_fp8.value if of_fp8 and of_fp8.side != "open" and not of_fp8.has_open_size else None,
        speedup_low=of_fp8.low if of_fp8 else None,
        speedup_high=of_fp8.high if of_fp8 else None,
        basis=said.basis,
        achievable_speedup=gives.value if gives and (gives.side != "open" or own_ms is None) else None,
        estimated_speedup=of_fp8.value if of_fp8 and estimated else None,
        step_ms=own_ms,
        bf16_step_ms=bf16.ms.value if bf16 and bf16.ms.basis == "measured" else None,
        best_step_ms=end.ms.value if end else None,
        best_variant=end.name if end else None,
        best_basis=end.ms.basis if end else None,
        tokens_per_s=1e3 * tokens * micro_batches(facts) / own_ms if own_ms and tokens else None,
        whole_step_low=low or None,
        whole_step_high=high,
        open=said.open,
    )
