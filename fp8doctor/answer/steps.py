"""The timed steps: a row for each variant and each process, their parts, and how they were timed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median

from msgspec import Struct
from msgspec.structs import replace

from fp8doctor.analysis.arms import arm, is_finite, labels, uses_fp8
from fp8doctor.analysis.noise import (
    gpu_contention,
    host_contention,
    script_interval,
    self_check_ratio,
    speed,
)
from fp8doctor.analysis.own_step import watched_job
from fp8doctor.analysis.significance import Interval, interval
from fp8doctor.analysis.step_difference import (
    parts_in_words,
    signed,
    watched_on_gpu,
    waterfall,
    with_attention_together,
    without_parts_of_a_cpu,
)
from fp8doctor.analysis.treatment_table import variant
from fp8doctor.analysis.trial_view import TrialView
from fp8doctor.analysis.watched import PARTS, exposed_ms, exposed_of_ranks, step_ms
from fp8doctor.facts import Arm, Breakdown, Facts, Rank, Trial, if_recorded, recorded
from fp8doctor.facts.arm_names import ArmName, is_conversion, is_in_bf16, is_withdrawn
from fp8doctor.facts.no_number import sentence_of
from fp8doctor.wording import percent, plural, times

COLUMNS = {
    "FP8 matmul": ("gemm_fp8",),
    "other matmul": ("gemm_16bit", "gemm_fp32"),
    "casts": ("cast",),
    "attention": ("attention",),
    "other": ("norm", "pointwise", "optimizer", "loss", "communication", "copy", "unknown"),
    "idle": (),
}
"""Part of a step -> families of `Breakdown`; idle time is in none."""

NONE_MS = 0.05
"""Time of a part, in ms, below which it counts as none: it would be printed as 0.0."""

UNCLASSIFIED_PCT = 1.0
"""Share of unclassified kernels, in per cent, above which it is shown: the project's goal is 99%."""

UNKNOWN_PARTS = {"trial.arms.breakdown": "Where the time goes", "trial.arms.peak_gib": "Peak memory"}
"""Gap of the trial's facts -> what is not known of every variant then."""

MANY = 3
"""Variants with one reason that are counted and not named."""

LONGEST_REASON = 200
"""Characters of a reason that are shown below the table: two lines of a terminal. A choice of length."""

WITHOUT_A_PRONOUN = {
    "^it changes (.+), which has no time$": r"needs \1, which was not timed",
    "(too small|too little memory left) for it$": r"\1",
    "^it ": "",
}
"""Reason of one variant -> reason of several."""


class Row(Struct, frozen=True):
    """A variant that was timed."""

    label: str
    ms: float
    step: str
    spread: str
    """Half the width of its 90% interval; empty if it is not known."""
    speed: str
    """BF16's time / its own, NaN or noisy; empty if there is nothing to hold it to."""
    side: str
    """``good`` or ``bad`` against the BF16 with its changes; else ``plain``."""
    memory: str
    """Peak in GiB; empty if it is not known."""
    parts_ms: tuple[float, ...]
    """Of every part in `COLUMNS`; empty if it was not profiled."""
    is_reliable: bool
    """False if its parts contradict its time, so that no bar shows them."""
    rounds: str
    """Number of its rounds, the FP8 matmuls and compiled graphs of one step."""


class Steps(Struct, frozen=True):
    """All timed variants, and what is to be said of them."""

    rows: tuple[Row, ...]
    method: str
    """How they were timed; empty if none was."""
    untimed: str
    """The variants without a time, with their reasons."""
    differences: tuple[str, ...] = ()
    """Why each FP8 step takes longer or less long than the best BF16."""
    notes: tuple[str, ...] = ()
    """On the parts: scaled, unreliable, unknown to every rule, or missing; on the trial's circumstances."""


def timed_steps(facts: Facts) -> Steps | None:
    """Write the measured steps, else a script's own; None if nothing was measured."""
    if not facts.arms():
        return _of_a_script(facts)
    facts = without_parts_of_a_cpu(facts)
    trial, names, fp8 = facts.trial, labels(facts), recorded(facts, "network") and uses_fp8(facts)
    order: dict[str, float] = {
        ArmName.BF16: 0,
        ArmName.BF16_COMPILED: 1,
        ArmName.BF16_WHOLE: 1.1,
        ArmName.BF16_AS_COMPILED: 1.2,
        ArmName.AS_IS: 1.5 if fp8 else -1,
        ArmName.PRESCRIBED: 2,
    }
    bases = {each.get("base") for each in trial.arms}
    same = arm(trial, ArmName.PRESCRIBED)  # in older reports, an alias of the variant that it equals
    arms = [
        each
        for each in trial.arms
        if not (each is not same and same and each.tried and each.rounds_ms == same.rounds_ms)
        and (not is_withdrawn(each.name, *each.get("treatments", ())) or (each.tried and each.name in bases))
    ]
    arms.sort(key=lambda each: order.get(each.name, 3))
    timed = [each for each in arms if each.tried and each.step_ms]
    return Steps(
        tuple(_row(each, names[each.name], facts, script_interval(each, trial)) for each in timed),
        _method(trial, timed),
        _untimed([each for each in arms if each not in timed], names),
        tuple(_differences(facts, names)),
        (*_notes(trial, arms, names), *_circumstances(facts)),
    )


def _of_a_script(facts: Facts) -> Steps | None:
    """Write the step of a watched script, what it waited for data among its idle time."""
    watched = watched_on_gpu(facts)
    if watched is None:
        return None
    step = replace(watched, breakdown=facts.observed.breakdown)
    names = {step.name: variant(step.name, recorded(facts, "network") and uses_fp8(facts))}
    steps = plural(len(facts.observed.steps_ms), "step")
    return Steps(
        (_row(step, names[step.name], facts, interval(facts.observed.steps_ms)),),
        f"Timed: {steps} of {watched_job(facts)} on the GPU; one more was profiled.",
        "",
        notes=tuple(_notes(Trial(), [step], names)),
    )


def _row(step: Arm, label: str, facts: Facts, found: Interval | None) -> Row:
    profiled = with_attention_together(step) if recorded(step, "breakdown") else None
    families = profiled.families_ms if profiled else {}
    busy = [sum(families.get(each, 0.0) for each in column) for column in COLUMNS.values()]
    speed, side = if_recorded(_speed, facts, step) or ("", "plain")
    counts = ((len(step.get("rounds_ms", ())), "round"), (step.get("fp8_gemms"), "FP8 matmul"))
    told = [plural(count, noun) for count, noun in (*counts, (step.get("graphs_run"), "graph")) if count]
    return Row(
        label=label,
        ms=step.step_ms or 0.0,
        step=f"{step.step_ms:,.1f}",
        spread=f"± {(found.high - found.low) / 2:,.1f}" if found else "",
        speed=speed,
        side=side,
        memory=f"{step.peak_gib:.1f}" if step.get("peak_gib") else "",
        parts_ms=(*busy[:-1], profiled.idle_ms) if profiled else (),
        is_reliable=profiled is not None and profiled.reliable,
        rounds=", ".join(told),
    )


def _speed(facts: Facts, step: Arm) -> tuple[str, str]:
    """Write a step's speed as a multiple of the best BF16's, and its side of the BF16 with its changes."""
    if not is_finite(step):
        return "NaN", "bad"
    view = TrialView(facts)
    best = view.bf16 if facts.arms() else None
    if best is None or step.name == ArmName.WITHOUT_ADAPTERS:
        return "", "plain"
    if step is best:
        return "1x", "plain"
    if speed(step, best, facts.trial).side == "open":
        return "noisy", "plain"
    unconverted = ArmName.AS_IS in (step.name, step.get("base")) and not is_conversion(step.name)
    in_bf16 = is_in_bf16(step.name) or (unconverted and not view.uses_fp8)
    fair = None if in_bf16 else view.fair_bf16(step)
    if not in_bf16 and fair is None:
        return "", "plain"
    side = speed(step, fair, facts.trial).side if fair else "even"
    return times(best.step_ms, step.step_ms), {"faster": "good", "slower": "bad"}.get(side, "plain")


def _untimed(arms: Iterable[Arm], names: Mapping[str, str]) -> str:
    """Name the variants that were not timed, those with the same reason together."""
    reasons: dict[str, list[str]] = {}
    for each in arms:
        reasons.setdefault(_in_short(sentence_of(each) or "no reason given"), []).append(names[each.name])
    named = {
        why: " · ".join(each) if len(each) < MANY else f"{len(each)} more variants"
        for why, each in reasons.items()
    }
    told = "; ".join(f"{each} ({why})" for why, each in named.items())
    return f"Not timed: {told}." if told else ""


def _in_short(reason: str) -> str:
    """Keep the first sentence of a long message, or what fits of it, without a pronoun."""
    for told, in_a_list in WITHOUT_A_PRONOUN.items():
        reason = re.sub(told, in_a_list, reason)
    first = reason if len(reason) <= LONGEST_REASON else reason.partition(". ")[0]
    return first if len(first) <= LONGEST_REASON else f"{first[:LONGEST_REASON].rpartition(' ')[0]} ..."


def _differences(facts: Facts, names: Mapping[str, str]) -> Iterator[str]:
    """Divide the difference of each FP8 step that was profiled from the best BF16."""
    view = TrialView(facts)
    bf16 = view.bf16
    for each in view.totals or [] if bf16 else ():
        fair = each.name == ArmName.AS_IS or view.fair_bf16(each) is bf16
        if bf16 and fair and (found := if_recorded(waterfall, each, bf16)):
            parts = f"{signed(found.difference_ms)} ms = {parts_in_words(found)}"
            yield f"{names[each.name]}, against {names[bf16.name]}: {parts}."


def _notes(trial: Trial, arms: Sequence[Arm], names: Mapping[str, str]) -> Iterator[str]:
    """Write the notes on the parts, variants with the same note together."""
    told: dict[str, list[str]] = {}
    for each in arms:
        name, found = names[each.name], each.get("breakdown") if each.tried else None
        for what, aside in _doubts(found) if found else ():
            told.setdefault(what, []).append(f"{name} ({aside})")
    yield from (f"{what}: {'; '.join(each)}." for what, each in told.items())
    gaps = trial.get("gaps", {})
    yield from (
        f"{what} is not known of every variant: {gaps[path]}."
        for path, what in UNKNOWN_PARTS.items()
        if path in gaps
    )


def _doubts(found: Breakdown) -> Iterator[tuple[str, str]]:
    """Say what is wrong with the parts of a step, and by how much."""
    if not found.reliable:
        yield "Unreliable parts", f"profiled, its kernels took {found.busy_ms:,.1f} ms"
    elif f"{found.scale:.2f}" != "1.00":
        yield "Scaled down to the step", f"profiled, its kernels took {found.scale:.2f} times as long"
    if found.unclassified_pct > UNCLASSIFIED_PCT:
        yield "In kernels that no rule knows (in other)", percent(found.unclassified_pct)


def _circumstances(facts: Facts) -> Iterator[str]:
    """Say what may have changed the times, with its size."""
    trial = facts.trial
    host = host_contention(trial.host) if recorded(trial, "host") else None
    yield from (f"While timed: {each}." for each in (host, gpu_contention(trial.get("health"))) if each)


def _method(trial: Trial, timed: Sequence[Arm]) -> str:
    """Write the basis: ``Timed: 4 variants in turn on NVIDIA H200, 15 rounds, the whole model.``"""
    if not timed:
        return ""
    parts = [f"{plural(len(timed), 'variant')} in turn on {trial.gpu or 'the CPU'}"]
    if rounds := max(len(each.get("rounds_ms", ())) for each in timed):
        parts.append(plural(rounds, "round"))
    parts.append(_depth(trial, timed))
    if trial.get("elapsed_s"):
        took, budget_s = f"{trial.elapsed_s:.0f} s", trial.get("budget_s")
        late = budget_s and trial.elapsed_s >= budget_s + 0.5
        parts.append(f"{took} of a budget of {budget_s:g} s" if late else took)
    alike = self_check_ratio(trial)
    alone = "; no step was timed against its own copy" if len(timed) > 1 else ""
    copies = f"; two copies of one step differ by {100 * abs(alike - 1):.1f}%" if alike else alone
    larger = any(each.get("tokens_ratio", 1.0) > 1 for each in timed)
    per_batch = " A larger batch's times are for as many tokens as the others'." if larger else ""
    return f"Timed: {', '.join(parts)}{copies}.{per_batch}"


def _depth(trial: Trial, timed: Sequence[Arm]) -> str:
    if not trial.get("blocks"):
        return "the whole model"
    cuts = (*(" + ".join(map(str, cut.blocks.values())) for cut in timed[0].cuts),)
    return f"extrapolated from {' and '.join(cuts)} of {' + '.join(map(str, trial.blocks.values()))} blocks"


MOST_RANKS = 16
"""Processes that are shown; two hosts of eight GPUs."""

ENDS = {
    "raised": "an exception ended it",
    "killed": "was killed, or exited without a shutdown of Python",
    "running": "still ran when rank 0 had ended",
    "not_seen": "not heard of",
}
"""Unusual end of a rank -> words for it."""


def ranks(facts: Facts) -> tuple[str, tuple[tuple[str, str], ...]] | None:
    """Write how the processes of a job were timed, and a label and a line for each; None for one process."""
    if not recorded(facts, "ranks"):
        return None
    processes = facts.ranks.processes
    each = [(f"rank {rank.rank}", ", ".join(_rank(rank))) for rank in processes[:MOST_RANKS]]
    if len(processes) > MOST_RANKS:
        each.append(("", f"and {plural(len(processes) - MOST_RANKS, 'rank')} more"))
    found = facts.get("training.distributed")
    kinds = ", ".join(filter(None, (found.get("wrapper"), found.get("backend")))) if found else ""
    tried = any(each.tried for each in facts.arms())
    alone = "then rank 0 timed copies alone" if tried else "no copy was timed"
    then = alone if recorded(facts, "trial") else "in place: nothing of the model is copied"
    profiled = (
        " Their GPU's times are of one profiled step, which is longer."
        if any(exposed_of_ranks(facts))
        else ""
    )
    job = f"{facts.ranks.world_size} processes{f' ({kinds})' if kinds else ''}, timed in their own steps"
    return f"{job}; {then}.{profiled}", tuple(each)


def _rank(rank: Rank) -> Iterator[str]:
    end = rank.get("end")
    if end in ENDS:
        yield ENDS[end]
    if not recorded(rank, "observed"):
        if end != "not_seen":
            yield "no window of steps was seen"
        return
    if (step := if_recorded(step_ms, rank.observed)) is not None:
        yield f"{step:,.1f} ms/step"
    for what, read in PARTS.items():
        if every := if_recorded(read, rank.observed):
            yield f"{median(every):,.1f} ms {what}"
    if ms := if_recorded(exposed_ms, rank.observed):
        yield f"{ms:,.1f} ms of communication alone"
