"""The variant that a plan ends in, and the timed variants on the way to it.

It is the simplest of the fastest that a GPU timed.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct
from msgspec.structs import replace

from fp8doctor.analysis.arms import (
    all_changes,
    arm,
    arm_if_any,
    best_bf16,
    changes_in_bf16,
    is_finite,
    ratio_on_screen,
    saved_ms,
    timed_a_model,
    timed_on_cpu,
    timed_on_gpu,
    uses_fp8,
)
from fp8doctor.analysis.compile_coverage import compiles_each_block
from fp8doctor.analysis.noise import SELF_CHECK_TOLERANCE, is_noise
from fp8doctor.analysis.significance import EVEN, is_even
from fp8doctor.analysis.treatment_table import COMPILE_BLOCKS, CUDA_GRAPHS, STAY_IN_BF16, family, traits
from fp8doctor.facts import Arm, Facts, Trial, if_recorded, recorded
from fp8doctor.facts.arm_names import BASELINES, ArmName, is_conversion, is_in_bf16, is_of_first_window
from fp8doctor.wording import minus


class PlanEnd(Struct, frozen=True):
    """The variant that the plan ends in, and what turns the step as it is into it."""

    arm: Arm
    in_bf16: bool
    """True if no layer of it runs in FP8."""
    changes: tuple[str, ...]
    """Treatments besides the conversion, or besides leaving FP8 off and compiling."""
    hidden: Arm | None = None
    """The fastest variant that may be faster than this one, if noise hides it."""

    @property
    def is_as_is(self) -> bool:
        return self.arm.name == ArmName.AS_IS


def plan_end(facts: Facts) -> PlanEnd | None:
    """Find the best variant that was timed; None without a GPU, or if the step as it is has no time.

    From the simplest on, a variant replaces another that is slower by more than two copies of one step may
    differ. Noise must not hide that if it replaces the step that the user runs, if it begins with FP8, if it
    has more changes, or if FP8 and BF16 are even. No plan ends in a step whose loss or gradients are not
    finite, unless BF16's are not either. A job in FP8 stays in it if that is as fast as BF16 and takes less
    memory.
    """
    if not timed_a_model(facts) or timed_on_cpu(facts):
        return None
    as_is, bf16 = arm(facts.trial, ArmName.AS_IS), best_bf16(facts)
    if as_is is None or bf16 is None:
        return None
    best, others = PlanEnd(as_is, not uses_fp8(facts), ()), list(_others(facts))
    hidden: list[Arm] = []
    if is_finite(bf16):
        others = [each for each in others if is_finite(each.arm)]
        best = best if is_finite(as_is) else PlanEnd(bf16, True, ())
    for each in others:
        faster = ratio_on_screen(best.arm, each.arm)
        begins_fp8 = not (uses_fp8(facts) or each.in_bf16)
        across = best.in_bf16 != each.in_bf16
        little = across and faster.median < 1 + EVEN
        unsure = faster.low <= 1 or (across and is_noise(best.arm, each.arm, facts.trial))
        if faster.median <= 1 + SELF_CHECK_TOLERANCE:
            continue
        adds = best.in_bf16 == each.in_bf16 and set(best.changes) < set(each.changes)
        if unsure and (best.is_as_is or begins_fp8 or adds or little):
            hidden.append(each.arm)
        else:
            best = each
    if best.in_bf16 and uses_fp8(facts):
        lean = [each for each in others if not each.in_bf16 and _is_leaner(each.arm, best.arm, facts.trial)]
        best = next(iter(lean), best)
    ahead = (each for each in hidden if ratio_on_screen(best.arm, each).median > 1 + SELF_CHECK_TOLERANCE)
    return replace(best, hidden=min(ahead, key=lambda each: each.step_ms or 0.0, default=None))


def _is_leaner(fp8: Arm, bf16: Arm, trial: Trial) -> bool:
    """Return whether FP8 is no slower than BF16, and takes less memory."""
    return ratio_on_screen(bf16, fp8).median >= 1 and gib_saved_at_no_cost(bf16, fp8, trial) > 0


def _others(facts: Facts) -> Iterator[PlanEnd]:
    """List the other totals, the simplest first: BF16, then by the number of changes, the plan first."""
    trial, in_fp8 = facts.trial, uses_fp8(facts)
    bf16 = best_bf16(facts)
    if bf16 is not None and bf16.name != ArmName.AS_IS:
        yield PlanEnd(bf16, True, ())
    timed = [each for each in trial.arms if each.tried and each.step_ms and recorded(each, "treatments")]
    for each in _by_time(timed):
        if changes := changes_in_bf16(each.name, each.treatments):
            yield PlanEnd(each, True, tuple(sorted(changes - {CUDA_GRAPHS})))  # which is how it is compiled
    whole = arm(trial, ArmName.PRESCRIBED)
    totals = [each for each in timed if _is_total(each)]
    found = [
        PlanEnd(each, not (in_fp8 or is_conversion(each.name)), tuple(_changes(facts, each)))
        for each in (*filter(None, [whole]), *_by_time(totals))
    ]
    yield from sorted(found, key=lambda each: len(each.changes))


def _changes(facts: Facts, of: Arm) -> list[str]:
    """List what turns the step as it is into a variant; blocks that the user compiles stay compiled."""
    compiled = is_conversion(of.name) and compiles_each_block(facts)
    return [name for name in all_changes(facts.trial, of) if not (compiled and traits(name).compiles)]


TELLS_GIB, TELLS_PCT = 0.25, 1.0
"""Difference of two peaks that counts, in GiB and in per cent: workspaces of the matmuls take 66 MiB on an
H200, and a peak predicted at full depth is within 1%."""


def gib_saved_at_no_cost(bf16: Arm, fp8: Arm, trial: Trial) -> float:
    """Return the GiB that FP8 saves if neither step is faster; 0 if one is, or if that is unknown."""
    whole, less = bf16.get("peak_gib"), fp8.get("peak_gib")
    if not whole or not less or trial.get("reliable") is False or is_noise(bf16, fp8, trial):
        return 0.0
    alike = is_even(ratio_on_screen(bf16, fp8))
    return whole - less if alike and whole - less >= max(TELLS_GIB, TELLS_PCT / 100 * whole) else 0.0


def leaner_fp8(facts: Facts) -> tuple[Arm, float] | None:
    """Find the FP8 variant that is even with the BF16 that the plan ends in, and saves the most GiB."""
    end = plan_end(facts)
    if end is None or not end.in_bf16:
        return None
    timed = [each for each in facts.trial.arms if each.tried and each.step_ms and is_in_fp8(each)]
    in_fp8 = [each for each in timed if uses_fp8(facts) or is_conversion(each.name)]
    saved = [(each, gib_saved_at_no_cost(end.arm, each, facts.trial)) for each in in_fp8]
    best = max(saved, key=lambda each: each[1], default=None)
    return best if best and best[1] > 0 else None


def is_in_fp8(each: Arm) -> bool:
    """Return whether it is a total of a job in FP8, in its last window."""
    return each.name in (ArmName.AS_IS, ArmName.PRESCRIBED) or _is_total(each)


def _is_total(each: Arm) -> bool:
    """Return whether it is a changed step that a user could run."""
    return (
        each.name not in (ArmName.AS_IS, ArmName.PRESCRIBED, ArmName.WITHOUT_ADAPTERS)
        and not is_in_bf16(each.name)
        and not is_of_first_window(each.name)
        and bool(each.get("treatments"))
    )


def _by_time(arms: list[Arm]) -> list[Arm]:
    return sorted(arms, key=lambda each: each.step_ms or 0.0)


class Link(Struct, frozen=True):
    """A part of the way from the step as it is to the plan's end."""

    before: Arm
    after: Arm
    names: frozenset[str]
    """Treatments that make ``after`` of ``before``, together if there are several."""


def way(facts: Facts, end: PlanEnd) -> tuple[Link, ...]:
    """Lead from the step as it is to the plan's end over timed variants, each faster than the last.

    The largest gain comes first, but leaving FP8 off before all that BF16 gains from. A change that does not
    gain by itself for sure shares a link with the next.
    """
    now, done = arm(facts.trial, ArmName.AS_IS), frozenset[str]()
    timed = (each for each in facts.trial.arms if each.tried and each.step_ms)
    stops = [(made, each) for each in timed if (made := _made(facts, each))]
    whole = next((made for made, each in stops if each.name == end.arm.name), done)
    first = whole & {STAY_IN_BF16}
    links: list[Link] = []
    while now is not None and done < whole:
        nearer = [
            (made, each)
            for made, each in stops
            if done < made < whole
            and first <= made
            and saved_ms(now, each).low > 0
            and minus(each.step_ms, end.arm.step_ms) > 0
            and (is_finite(each) or not is_finite(end.arm))
        ]
        made, after = min(nearer, key=lambda stop: (len(stop[0]), stop[1].step_ms), default=(whole, end.arm))
        links.append(Link(now, after, made - done))
        now, done = after, made
    return tuple(links)


def pair_in_use(facts: Facts, end: PlanEnd, name: str) -> tuple[Arm, Arm] | None:
    """Find the step without and with a change, in BF16 if the plan ends there; None if not timed.

    It is the pair with the most of the plan's other changes.
    """
    timed = [each for each in facts.trial.arms if each.tried and each.step_ms]
    stops = [(_made(facts, each), each) for each in timed]
    whole = next((made for made, each in stops if each.name == end.arm.name), frozenset())
    pairs = [
        (made, before, after)
        for made, before in stops
        for more, after in stops
        if name not in made and more == made | {name} and whole & {STAY_IN_BF16} <= made <= whole
    ]
    _, *found = max(pairs, key=lambda pair: len(pair[0]), default=(None,))
    return (found[0], found[1]) if found else None


def kind(name: str, facts: Facts) -> str:
    """Name a treatment as `Link` does: without FP8, a baseline is the job compiled, in any way."""
    compiles = traits(name).compiles or name == STAY_IN_BF16
    return family(COMPILE_BLOCKS) if compiles and not uses_fp8(facts) else name


def _made(facts: Facts, of: Arm) -> frozenset[str]:
    """Name what makes a variant of the step as it is; empty if no plan leads through it."""
    if of.name == ArmName.WITHOUT_ADAPTERS:
        return frozenset()
    if not is_in_bf16(of.name):
        return frozenset(kind(name, facts) for name in _changes(facts, of))
    bf16 = bf16_of_the_plan(facts)
    changes = changes_in_bf16(of.name, of.get("treatments", ())) - {CUDA_GRAPHS}
    if bf16 is None or (of.name != bf16.name and not (changes and _form_of(facts, of) == bf16)):
        return frozenset()
    return changes | {kind(STAY_IN_BF16, facts)}


def bf16_of_the_plan(facts: Facts) -> Arm | None:
    """Find the form of the BF16 that the plan ends in, else of the fastest; None if no GPU timed any.

    Of one with other changes than CUDA graphs it is the baseline that they change.
    """
    end = if_recorded(plan_end, facts)
    if end is None or not end.in_bf16:
        return if_recorded(best_bf16, facts) if timed_on_gpu(facts) else None
    return (_form_of(facts, end.arm) if end.arm.name != ArmName.BF16_CUDA_GRAPHS else None) or end.arm


def _form_of(facts: Facts, of: Arm) -> Arm | None:
    """Find the baseline that a BF16 variant changes, or changes a change of."""
    below: Arm | None = of
    while below is not None and below.name not in BASELINES:
        below = arm_if_any(facts, below.get("base") or "")
    return below
