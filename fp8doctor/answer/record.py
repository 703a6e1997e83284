"""The answer of a report as a record, and what a screen asks of it."""

import math

from msgspec import Struct

from fp8doctor.analysis.memory import USABLE, Fit
from fp8doctor.analysis.significance import Number
from fp8doctor.analysis.step_difference import REST, SHOWN_MS, UNEXPLAINED
from fp8doctor.analysis.treatment_table import STAY_IN_BF16
from fp8doctor.answer.causes import Cause
from fp8doctor.answer.comparison import Comparison
from fp8doctor.answer.items import Item
from fp8doctor.answer.steps import Steps
from fp8doctor.answer.verdict import Fault, Open, Status
from fp8doctor.diagnosis.document import Step
from fp8doctor.facts import recorded
from fp8doctor.finding import Basis, Saving

PART_SHARE, REST_SHARE = 0.3, 0.1
"""Part / the largest, from which more than two are named, or more than one with two causes; and the rest."""


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

    times_it: str = ""
    """The command that would time an estimate, which leaves nothing open."""

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
        """The largest parts of the difference of FP8 and BF16, the largest first, and a rest that counts."""
        every, few = self.compared.parts_ms, 2 - bool(self.causes[1:])
        parts = {name: abs(ms) for name, ms in every.items() if name != REST and abs(ms) >= SHOWN_MS}
        names = sorted(parts, key=lambda name: -parts[name])
        names = names[:few] + [each for each in names[few:] if parts[each] >= PART_SHARE * parts[names[0]]]
        told = {name: every[name] for name in names}
        rest = sum(every.values()) - sum(told.values())
        tells = told and abs(rest) >= max(SHOWN_MS, REST_SHARE * parts[names[0]])
        return told | ({REST: rest} if tells else {})

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
    def mends(self) -> bool:
        """Return whether a fix of the plan is for the fault."""
        found = self.fault.finding if self.fault else None
        return found is not None and any(found.name in step.names for step in self.fixes)

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
    def untimed(self) -> dict[int, Step]:
        """Number the fixes that have no measured saving, alone or together with another."""
        return {
            number: each
            for number, each in enumerate(self.fixes, 1)
            if not (each.together or (each.saving_ms and each.saving_ms.basis == "measured"))
        }

    @property
    def timed_fixes(self) -> tuple[int, ...]:
        """Number the fixes that make the plan's end if others of the plan were not timed; else empty."""
        late, every = self.untimed, range(1, len(self.fixes) + 1)
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
            return self.takes_no_fp8 and not self.untimed
        return ends and found.side in ("slower", "faster") and not found.has_open_size

    @property
    def command(self) -> str:
        """Return the command that answers the first open question."""
        return next((each.command for each in self.open if each.command), "")
