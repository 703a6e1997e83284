"""The timed steps: a row for each variant and each process, their parts, and how they were timed."""

from collections.abc import Iterable, Iterator, Sequence
from statistics import median
from textwrap import shorten

from msgspec import Struct

from fp8doctor.analysis.arms import Variant, arm
from fp8doctor.analysis.noise import busy_host, gpu_contention, script_interval
from fp8doctor.analysis.own_step import watched_job
from fp8doctor.analysis.significance import EVEN, Number
from fp8doctor.analysis.step_difference import parts_in_words, signed, waterfall, with_attention_together
from fp8doctor.analysis.trial_view import TrialView
from fp8doctor.analysis.watched import PARTS, exposed_ms, exposed_of_ranks, step_ms
from fp8doctor.facts import Breakdown, Facts, Rank, if_recorded, recorded
from fp8doctor.facts.arm_names import BF16_BASELINES, ArmName, is_withdrawn
from fp8doctor.facts.no_number import sentence_of
from fp8doctor.wording import plural, times

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

MANY = 3
"""Variants with one reason that are counted and not named."""

LONGEST_REASON = 200
"""Characters of a reason that are shown below the table: two lines of a terminal. A choice of length."""


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
    untimed: str = ""
    """The variants without a time, with their reasons."""
    differences: tuple[str, ...] = ()
    """Why each FP8 step takes longer or less long than the best BF16."""
    notes: tuple[str, ...] = ()
    """On unreliable parts, and on the trial's circumstances."""


def timed_steps(view: TrialView) -> Steps | None:
    """Write the measured steps, else a script's own; None if nothing was measured."""
    if not view.facts.arms():
        return _of_a_script(view)
    trial, words = view.trial, view.words
    order: list[str] = [*BF16_BASELINES, ArmName.AS_IS, ArmName.PRESCRIBED]
    order = order if if_recorded(lambda: view.uses_fp8) else [ArmName.AS_IS, *order]
    bases = {each.get("base") for each in trial.arms}
    same = arm(view.facts, ArmName.PRESCRIBED)  # in older reports, an alias of the variant that it equals
    arms = [
        each
        for each in trial.arms
        if each is same or not (same and each.tried and each.rounds_ms == same.rounds_ms)
        if not is_withdrawn(each.name, *each.get("treatments", ())) or (each.tried and each.name in bases)
    ]
    arms.sort(key=lambda each: order.index(each.name) if each.name in order else len(order))
    by_words = {words[each.name]: view.timed[each.name] for each in arms if each.name in view.timed}
    timed = [*by_words.values()]
    rows = tuple(_row(each, view, script_interval(each.arm, trial)) for each in timed)
    late = dict[str, list[str]]()
    for each in arms:
        if each.name not in view.timed:
            why = shorten(sentence_of(each) or "no reason given", LONGEST_REASON, placeholder=" ...")
            late.setdefault(why.removeprefix("it "), []).append(words[each.name])
    told = [
        f"{' · '.join(names) if len(names) < MANY else f'{len(names)} more variants'} ({why})"
        for why, names in late.items()
    ]
    untimed = f"Not timed: {'; '.join(told)}." if told else ""
    method = _method(view, timed) if timed else ""
    return Steps(rows, method, untimed, tuple(_differences(view)), tuple(_notes(timed, view)))


def _of_a_script(view: TrialView) -> Steps | None:
    """Write the step of a watched script, what it waited for data among its idle time."""
    step = view.watched
    if step is None or not recorded(step.arm, "breakdown"):
        return None
    steps = plural(step.rounds, "step")
    method = f"Timed: {steps} of {watched_job(view.facts)} on the GPU; one more was profiled."
    return Steps((_row(step, view, step.ms),), method, notes=tuple(_notes([step], view)))


def _profile(step: Variant, view: TrialView) -> Breakdown | None:
    """Return the parts of a step on a GPU: a CPU's operators are no kernels."""
    on_cpu = view.trial.get("device") == "cpu"
    return None if on_cpu or not recorded(step.arm, "breakdown") else with_attention_together(step.arm)


def _row(step: Variant, view: TrialView, known: Number | None) -> Row:
    profiled, peak_gib = _profile(step, view), step.arm.get("peak_gib")
    families = profiled.families_ms if profiled else {}
    busy = [sum(families.get(each, 0.0) for each in column) for column in COLUMNS.values()]
    speed, side = _speed(view, step)
    counts = {
        "round": step.rounds,
        "FP8 matmul": step.arm.get("fp8_gemms"),
        "graph": step.arm.get("graphs_run"),
    }
    return Row(
        label=step.words,
        ms=step.ms.value,
        step=f"{step.ms.value:,.1f}",
        spread=f"± {(known.high - known.low) / 2:,.1f}" if known else "",
        speed=speed,
        side=side,
        memory=f"{peak_gib:.1f}" if peak_gib else "",
        parts_ms=(*busy[:-1], profiled.idle_ms) if profiled else (),
        is_reliable=profiled is not None and profiled.reliable,
        rounds=", ".join(plural(count, noun) for noun, count in counts.items() if count),
    )


def _speed(view: TrialView, step: Variant) -> tuple[str, str]:
    """Write a step's speed as a multiple of the best BF16's, and its side of the BF16 with its changes."""
    best = view.bf16
    if not step.is_finite:
        return "NaN", "bad"
    if best is None or step is best:
        return "1x" if best else "", "plain"
    if view.speed(step, best).side == "open":
        return "noisy", "plain"
    shown = times(best.ms.value, step.ms.value)
    if not step.in_fp8:
        return shown, "plain"
    fair = view.fair_bf16(step)
    side = view.speed(step, fair).side if fair else ""
    return shown if fair else "", {"faster": "good", "slower": "bad"}.get(side, "plain")


def _differences(view: TrialView) -> Iterator[str]:
    """Divide the difference of each FP8 step that was profiled from the best BF16."""
    bf16 = view.bf16
    for each in view.in_fp8 if bf16 else ():
        fair = each.is_as_is or view.fair_bf16(each) is bf16
        if bf16 and fair and (found := if_recorded(waterfall, each.arm, bf16.arm)):
            parts = f"{signed(found.difference_ms)} ms = {parts_in_words(found)}"
            yield f"{each.words}, against {bf16.words}: {parts}."


def _notes(steps: Iterable[Variant], view: TrialView) -> Iterator[str]:
    """Say what is wrong with the parts of the steps, and what may have changed the times."""
    parts = ((each.words, _profile(each, view)) for each in steps)
    doubted = [
        f"{words} (profiled, its kernels took {found.busy_ms:,.1f} ms)"
        for words, found in parts
        if found and not found.reliable
    ]
    if doubted:
        yield f"Unreliable parts: {'; '.join(doubted)}."
    disturbed = (busy_host(view.trial, idle_pct=100 * EVEN), gpu_contention(view.trial.get("health")))
    yield from (f"While timed: {each}." for each in disturbed if each)


def _method(view: TrialView, timed: Sequence[Variant]) -> str:
    """Write the basis: ``Timed: 4 variants in turn on NVIDIA H200, 15 rounds, the whole model.``"""
    trial = view.trial
    parts = [f"{plural(len(timed), 'variant')} in turn on {trial.gpu or 'the CPU'}"]
    if rounds := max(each.rounds for each in timed):
        parts.append(plural(rounds, "round"))
    blocks, cuts = trial.get("blocks", {}), (each.blocks for each in timed[0].arm.get("cuts", ()))
    depths = [" + ".join(map(str, each.values())) for each in (*cuts, blocks)]
    of = f"extrapolated from {' and '.join(depths[:-1])} of {depths[-1]} blocks"
    parts.append(of if blocks else "the whole model")
    if took_s := trial.get("elapsed_s"):
        parts.append(f"{took_s:.0f} s")
    alike = trial.get("self_check_ratio")
    copies = f"; two copies of one step differ by {100 * abs(alike - 1):.1f}%" if alike else ""
    larger = any(each.arm.get("tokens_ratio", 1.0) > 1 for each in timed)
    per_batch = " A larger batch's times are for as many tokens as the others'." if larger else ""
    return f"Timed: {', '.join(parts)}{copies}.{per_batch}"


MOST_RANKS = 16
"""Processes that are shown; two hosts of eight GPUs."""


def ranks(facts: Facts) -> tuple[str, tuple[tuple[str, str], ...]] | None:
    """Write how the processes of a job were timed, and a label and a line for each; None for one process."""
    if not recorded(facts, "ranks.processes"):
        return None
    processes = facts.ranks.processes
    each = [(f"rank {rank.get('rank', '?')}", ", ".join(_rank(rank))) for rank in processes[:MOST_RANKS]]
    if len(processes) > MOST_RANKS:
        each.append(("", f"and {plural(len(processes) - MOST_RANKS, 'rank')} more"))
    found = facts.get("training.distributed")
    zero = "ZeRO" * (facts.get("training.optimizer") or "").startswith("deepspeed.runtime.zero.")
    kinds = ", ".join(filter(None, (found.get("wrapper"), zero, found.get("backend")))) if found else ""
    tried = any(each.tried for each in facts.arms())
    alone = "then rank 0 timed copies alone" if tried else "no copy was timed"
    then = alone if recorded(facts, "trial") else "in place: nothing of the model is copied"
    note = " GPU times are of one more, profiled step; communication is cut to fit, parts may overlap."
    profiled = note if any(exposed_of_ranks(facts)) else ""
    many, of = facts.ranks.get("world_size", len(processes)), f" ({kinds})" * bool(kinds)
    return f"{many} processes{of}, timed in their own steps; {then}.{profiled}", tuple(each)


def _rank(rank: Rank) -> Iterator[str]:
    if (end := rank.get("end", "ended")) != "ended":
        yield end.replace("_", " ")
    if not recorded(rank, "observed"):
        yield "no window of steps was seen"
        return
    if (step := if_recorded(step_ms, rank.observed)) is not None:
        yield f"{step:,.1f} ms/step"
    for what, read in PARTS.items():
        if every := if_recorded(read, rank.observed):
            yield f"{median(every):,.1f} ms {what}"
    if ms := if_recorded(exposed_ms, rank.observed):
        yield f"{ms:,.1f} ms of communication alone"
