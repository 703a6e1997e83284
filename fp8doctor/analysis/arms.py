"""The variants of a step: their times, their names, and their changes."""

from collections.abc import Sequence

from msgspec import Struct

from fp8doctor.analysis.own_step import compiles_any, own_words
from fp8doctor.analysis.significance import Number, holding, interval
from fp8doctor.analysis.treatment_table import (
    AUTOCAST_BF16,
    CHECKPOINTING_OFF,
    COMPILE_BLOCKS,
    VARIANTS,
    family,
    in_words,
    that_help_bf16_too,
    variant,
)
from fp8doctor.facts import Arm, Facts, Trial, if_recorded, recorded
from fp8doctor.facts.arm_names import (
    LEFT_OUT_FOR_TIME,
    ArmName,
    change_in_bf16,
    is_conversion,
    is_in_bf16,
    is_withdrawn,
)
from fp8doctor.facts.no_number import why_of
from fp8doctor.recipes import low_precision
from fp8doctor.wording import quotient

BF16_WITH = {frozenset({CHECKPOINTING_OFF}): ArmName.BF16_WITHOUT_CHECKPOINTING}
"""Changes that help BF16 too -> BF16 with them, if there is such a variant."""


class Variant(Struct, frozen=True):
    """One form of the training step, and its time: timed on a GPU, watched, or estimated."""

    name: str
    """As the JSON names it: ``as_is``, ``bf16_compiled``, ``planned``."""
    words: str
    in_fp8: bool
    ms: Number
    changes: tuple[str, ...] = ()
    """Treatments that make it of the step as it is, besides leaving FP8 off, converting and compiling."""
    arm: Arm = Arm()
    """Its rounds and its profile; empty for an estimate."""

    @property
    def is_as_is(self) -> bool:
        return self.name == ArmName.AS_IS

    @property
    def is_finite(self) -> bool:
        """Return whether no loss or gradient was seen to be NaN or infinite."""
        return not self.arm.get("non_finite")

    @property
    def rounds(self) -> int:
        """Count how often it was timed; 0 for an estimate."""
        return len(self.arm.get("rounds_ms", ()))


def timed_on_cpu(facts: Facts) -> bool:
    return bool(facts.get("trial.device") == "cpu")


def arm(facts: Facts, name: str) -> Arm | None:
    """Return the variant of that name, if there was a trial that timed it."""
    arms = facts.trial.arms if recorded(facts, "trial") else ()
    return next((each for each in arms if each.name == name and each.tried), None)


def lacked_time(planned: Arm) -> bool:
    return not planned.get("tried", True) and why_of(planned) in LEFT_OUT_FOR_TIME


def changes_in_bf16(of: Arm) -> frozenset[str]:
    """Name what a BF16 variant changes besides leaving FP8 off; empty for a baseline."""
    if of.name == ArmName.BF16_PRESCRIBED or change_in_bf16(of.name):
        return frozenset(of.get("treatments", ()))
    return next((changes for changes, name in BF16_WITH.items() if of.name == name), frozenset())


def all_changes(trial: Trial, of: Arm) -> list[str]:
    """List the treatments of a variant, and of all that it is built on.

    Of a family the last stands: a recipe takes the place of the base's.
    """
    arms = {each.name: each for each in trial.arms if recorded(each, "name")}
    below: Arm | None = of
    found: dict[str, str] = {}
    while below is not None:
        found = {family(name): name for name in below.get("treatments", ())} | found
        below = arms.pop(below.get("base") or "", None)
    return [*found.values()]


def uses_fp8(facts: Facts) -> bool:
    return bool(facts.network.fp8)


def round_ratios(a: Arm, b: Arm) -> list[float]:
    """Divide the times of ``a`` by those of ``b``, paired by round: rounds share clocks."""
    return [x / y for x, y in zip(a.rounds_ms, b.rounds_ms, strict=False)]


def ratio(a: Arm, b: Arm) -> Number:
    """Divide the two times on the screen, with the interval of their rounds around it.

    The median over the rounds is another number.
    """
    return as_shown(interval(round_ratios(a, b)), a.step_ms, b.step_ms)


def as_shown(rounds: Number, a_ms: float | None, b_ms: float | None) -> Number:
    """Put the quotient of two shown times into the interval of their rounds."""
    return holding(quotient(a_ms, b_ms) or rounds.value, rounds.low, rounds.high)


def ratio_apart(a: Sequence[float], b: Sequence[float]) -> Number:
    """Divide times that share no rounds."""
    over, under = interval(a), interval(b)
    return Number(value=over.value / under.value, low=over.low / under.high, high=over.high / under.low)


def labels(facts: Facts) -> dict[str, str]:
    """Name every variant by what it changes, and by what the variant changes that it is built on."""
    fp8, own = bool(if_recorded(uses_fp8, facts)), own_words(facts)
    low, compiles = low_precision(facts.linears()), compiles_any(facts)
    arms = {each.name: each for each in facts.arms() if recorded(each, "name")}
    found = {}
    for name, of in arms.items():
        alone, base = of.get("treatments", ()), arms.get(of.get("base") or "")
        if alone and (name in (ArmName.PRESCRIBED, ArmName.BF16_PRESCRIBED) or is_withdrawn(name)):
            words = ["BF16" if name == ArmName.BF16_PRESCRIBED else "FP8", *map(in_words, alone)]
        else:
            again = alone == (COMPILE_BLOCKS,) and ArmName.BF16_AS_COMPILED in arms
            words = [variant(name, fp8, own=own, change="by block" if again else "", low=low)]
            if is_conversion(name):
                shared = that_help_bf16_too(alone) - {AUTOCAST_BF16}
                words += [in_words(each) for each in alone if each in shared]
            if base and name != ArmName.AS_IS and name not in VARIANTS:
                kinds = {family(each) for each in alone}  # of which the last stands
                words += [in_words(each) for each in base.get("treatments", ()) if family(each) not in kinds]
        on_compiled = compiles or (base is not None and base.name not in (ArmName.BF16, ArmName.AS_IS))
        if is_in_bf16(name) and on_compiled and of.get("graphs_run") and "compile" not in " ".join(words):
            words.append("compiled whole" if base and base.name == ArmName.BF16_WHOLE else "compiled")
        found[name] = ", ".join(words)
    return found
