"""The table of measured steps: a row per variant, with its parts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from fp8doctor.analysis.arms import arm, best_bf16, fair_bf16, fp8_totals, uses_fp8
from fp8doctor.analysis.layers import expert_rows
from fp8doctor.analysis.noise import script_interval, self_check_ratio
from fp8doctor.analysis.outcome import watched_job
from fp8doctor.analysis.significance import Interval, interval
from fp8doctor.analysis.step_difference import (
    Waterfall,
    parts_in_words,
    signed,
    watched_on_gpu,
    waterfall,
    with_attention_together,
    without_parts_of_a_cpu,
)
from fp8doctor.analysis.treatment_table import variant, variant_in_a_sentence
from fp8doctor.analysis.variant_names import labels
from fp8doctor.facts import Arm, Breakdown, Facts, Trial, if_recorded, recorded
from fp8doctor.facts.arm_names import BF16_BASELINES, ArmName, is_withdrawn
from fp8doctor.facts.no_number import sentence_of
from fp8doctor.known_errors import in_a_sentence
from fp8doctor.render.words import more_variants
from fp8doctor.wording import percent, plural

COLUMNS = {
    "FP8 matmul": ("gemm_fp8",),
    "other matmul": ("gemm_16bit", "gemm_fp32"),
    "casts": ("cast",),
    "attention": ("attention",),
    "other": ("norm", "pointwise", "optimizer", "loss", "communication", "copy", "unknown"),
}
"""Columns of the table -> families of `Breakdown`; idle time stands behind them."""

NONE_MS = 0.05
"""Time of a part, in ms, below which it counts as none: it would be printed as 0.0."""

UNCLASSIFIED_PCT = 1.0
"""Share of unclassified kernels, in per cent, above which it is shown: the project's goal is 99%."""

UNKNOWN_PARTS = {"trial.arms.breakdown": "Where the time goes", "trial.arms.peak_gib": "Peak memory"}
"""Gap of the trial's facts -> what is not known of every variant then."""


class Row(Struct, frozen=True):
    """One variant, as it is shown."""

    label: str
    step: str
    """Milliseconds a step with half the width of its 90% interval; empty if it was not timed."""
    memory: str
    """Peak in GiB; ``?`` if those of others are known, empty on a CPU."""
    reason: str
    """Why it was not timed; empty otherwise."""
    parts: tuple[str, ...] = ()
    """Milliseconds of every column of `Timing.columns`, ``-`` for none; empty if it was not profiled."""
    arm: Arm | None = None
    """The timed variant, for renderers that draw it; None if it was not timed."""
    spread: str = ""
    """Half the width of its 90% interval, as in ``ms``; empty if it is not known."""

    @property
    def note(self) -> str:
        """Return the text in place of the times; empty if there are some."""
        return f"not timed: {self.reason}" if self.reason else ""


class Timing(Struct, frozen=True):
    """The table and the sentences under it."""

    rows: tuple[Row, ...]
    columns: tuple[str, ...]
    """Parts of the step; empty if no variant was profiled."""
    differences: tuple[str, ...]
    """Why FP8 takes longer or less long than BF16, one sentence for each FP8 step that was profiled."""
    notes: tuple[str, ...]
    """Notes on the parts: scaled, unreliable, unknown to every rule, or missing."""
    basis: str
    """How the times were taken."""
    waterfalls: tuple[Waterfall, ...] = ()
    """The same differences in numbers; of and against are labels."""


def timing(facts: Facts) -> Timing | None:
    """Write the measured steps, else a script's own; None if nothing was measured."""
    if not facts.arms():
        return _of_a_script(facts)
    facts = without_parts_of_a_cpu(facts)
    fp8 = _trains_in_fp8(facts)
    order: dict[str, float] = {
        ArmName.BF16: 0,
        ArmName.BF16_COMPILED: 1,
        ArmName.BF16_AS_COMPILED: 1.2,
        ArmName.AS_IS: 1.5 if fp8 else -1,
        ArmName.PRESCRIBED: 2,
    }
    bases = {arm.get("base") for arm in facts.trial.arms} - {None, ArmName.AS_IS, *BF16_BASELINES}
    shown = [
        arm
        for arm in facts.trial.arms
        if (not is_withdrawn(arm.name, *arm.get("treatments", ())) and not _is_prescribed(arm, facts.trial))
        or (arm.tried and arm.name in bases)
    ]
    arms = sorted(shown, key=lambda arm: order.get(arm.name, 3))
    names = labels(facts)
    rows = _together(
        _with_unknown_memory([_row(arm, names, spread(script_interval(arm, facts.trial))) for arm in arms])
    )
    columns = (*COLUMNS, "idle") if any(row.parts for row in rows) else ()
    notes = (*_notes(facts.trial, arms, names), *_routing(facts), *_circumstances(facts.trial))
    found = _waterfalls(facts, names)
    return Timing(rows, columns, tuple(map(_difference, found)), notes, _basis(facts.trial, arms), found)


def _routing(facts: Facts) -> Iterator[str]:
    """Say that a synthetic batch decides on the rows of experts."""
    rows = expert_rows(facts)
    made_up = facts.get("workload.batch_source") == "made up"
    if rows is not None and made_up:
        had = f" (here {min(rows)} to {max(rows)})" if rows else ""
        yield (
            f"The router gives each expert its rows{had}, and the batch is synthetic: in training they are "
            "others, and so are the times of the experts."
        )


def _of_a_script(facts: Facts) -> Timing | None:
    """Write the step of a watched script, what it waited for data among its idle time."""
    watched = watched_on_gpu(facts)
    if watched is None:
        return None
    arm = replace(watched, breakdown=facts.observed.breakdown)
    names = {arm.name: variant(arm.name, _trains_in_fp8(facts))}
    steps = plural(len(facts.observed.steps_ms), "step")
    return Timing(
        (_row(arm, names, spread(interval(facts.observed.steps_ms))),),
        (*COLUMNS, "idle"),
        (),
        tuple(_notes(Trial(), [arm], names)),
        f"Timed: {steps} of {watched_job(facts)} on the GPU; one more was profiled.",
    )


def _is_prescribed(shown: Arm, trial: Trial) -> bool:
    """Return whether an older report shows its times as the prescription's too."""
    prescribed = arm(trial, ArmName.PRESCRIBED)
    if prescribed is None or shown is prescribed:
        return False
    return shown.tried and shown.rounds_ms == prescribed.rounds_ms


MANY = 3
"""Rows without a time that say the same and stand in one line from this number on."""


def _with_unknown_memory(rows: list[Row]) -> list[Row]:
    """Mark the peaks that are not known among those that are."""
    if not any(row.memory for row in rows):
        return rows
    return [replace(row, memory=row.memory or "?") if row.step else row for row in rows]


def _together(rows: list[Row]) -> tuple[Row, ...]:
    """Fold rows without a time that share a long list's reason into one."""
    shared = Counter(row.reason for row in rows if row.reason)
    shown: list[Row] = []
    told: set[str] = set()
    for row in rows:
        if shared[row.reason] < MANY:
            shown.append(row)
        elif row.reason not in told:
            told.add(row.reason)
            shown.append(Row(more_variants(shared[row.reason]), "", "", row.reason))
    return tuple(shown)


def _trains_in_fp8(facts: Facts) -> bool:
    return recorded(facts, "network") and uses_fp8(facts)


def _by_label(arm: Arm, names: Mapping[str, str]) -> str:
    """Call FP8 with all fixes, and the variant that this one changes, what the table calls them."""
    reason = sentence_of(arm) or "no reason given"
    for name in (ArmName.PRESCRIBED, arm.get("base")):
        if name in names:
            quoted = f'"{names[name]}"' if "," in names[name] else names[name]
            reason = reason.replace(variant_in_a_sentence(name), quoted)
    return reason


def _row(arm: Arm, names: Mapping[str, str], apart: str) -> Row:
    if not arm.tried or not arm.step_ms:
        return Row(names[arm.name], "", "", _by_label(arm, names))
    return Row(
        names[arm.name],
        f"{arm.step_ms:,.1f} {apart}".rstrip(),
        f"{arm.peak_gib:.1f}" if arm.get("peak_gib") else "",
        "",
        _parts(arm),
        arm,
        apart,
    )


def spread(found: Interval | None) -> str:
    """Write half the width of an interval: ``± 2.9``."""
    return f"± {(found.high - found.low) / 2:,.1f}" if found else ""


def parts_ms(arm: Arm) -> tuple[float, ...]:
    """Return the ms of every column of `Timing.columns`; empty if not profiled."""
    found = _profiled(arm)
    if found is None:
        return ()
    families = found.families_ms
    return (*(sum(families.get(each, 0.0) for each in column) for column in COLUMNS.values()), found.idle_ms)


def drawn_ms(arm: Arm) -> tuple[float, ...]:
    """Return the ms of every column for a bar; empty if the parts are unreliable."""
    found = _profiled(arm)
    return parts_ms(arm) if found is not None and found.reliable else ()


def _profiled(arm: Arm) -> Breakdown | None:
    return with_attention_together(arm) if arm.tried and recorded(arm, "breakdown") else None


def _parts(arm: Arm) -> tuple[str, ...]:
    return tuple(f"{ms:,.1f}" if ms >= NONE_MS else "-" for ms in parts_ms(arm))


def _notes(trial: Trial, arms: list[Arm], names: Mapping[str, str]) -> Iterator[str]:
    """Write the notes on the parts, variants with the same note together."""
    parts = [(names[arm.name], found) for arm in arms if (found := _profiled(arm))]
    told = {
        "Unreliable parts": [
            f"{name} (profiled, its kernels took {found.busy_ms:,.1f} ms)"
            for name, found in parts
            if not found.reliable
        ],
        "Scaled down to the step": [
            f"{name} (profiled, its kernels took {found.scale:.2f} times as long)"
            for name, found in parts
            if _is_scaled(found)
        ],
        "In kernels that no rule knows (in other)": [
            f"{percent(found.unclassified_pct)} of {name}"
            for name, found in parts
            if found.unclassified_pct > UNCLASSIFIED_PCT
        ],
    }
    yield from (f"{what}: {'; '.join(names)}." for what, names in told.items() if names)
    yield from _known_errors(arms, names)
    gaps = trial.get("gaps", {})
    yield from (
        f"{UNKNOWN_PARTS[path]} is not known of every variant: {reason}."
        for path, reason in gaps.items()
        if path in UNKNOWN_PARTS
    )


def _known_errors(arms: list[Arm], names: Mapping[str, str]) -> Iterator[str]:
    """Tell the cause of what stopped a variant, if its message is a known one."""
    stopped: dict[str, list[str]] = {}
    for each in arms:
        known = None if each.tried and each.step_ms else in_a_sentence(each.reason or "")
        if known:
            stopped.setdefault(known, []).append(names[each.name])
    yield from (f"{'; '.join(names)}: {known}." for known, names in stopped.items())


def _is_scaled(found: Breakdown) -> bool:
    return found.reliable and f"{found.scale:.2f}" != "1.00"


def _waterfalls(facts: Facts, names: Mapping[str, str]) -> tuple[Waterfall, ...]:
    """Divide the difference of each FP8 step that was profiled from the best BF16."""
    bf16 = best_bf16(facts) if recorded(facts, "network") else None
    if bf16 is None:
        return ()
    return tuple(
        replace(each, of=names[each.of], against=names[bf16.name])
        for arm in fp8_totals(facts)
        if (arm.name == ArmName.AS_IS or fair_bf16(facts, arm) is bf16)
        and (each := if_recorded(waterfall, arm, bf16))
    )


def _difference(found: Waterfall) -> str:
    parts = parts_in_words(found)
    return f"{found.of}, against {found.against}: {signed(found.difference_ms)} ms = {parts}."


def _basis(trial: Trial, arms: Sequence[Arm]) -> str:
    """Write the basis: ``Timed: 4 variants in turn on NVIDIA H200, 15 rounds, the whole model.``"""
    timed = [arm for arm in arms if arm.tried]
    if not timed:
        return ""
    parts = [f"{plural(len(timed), 'variant')} in turn on {trial.gpu or 'the CPU'}"]
    if rounds := max(len(arm.get("rounds_ms", ())) for arm in timed):
        parts.append(plural(rounds, "round"))
    parts.append(_depth(trial) or "the whole model")
    if trial.get("elapsed_s"):
        took, budget_s = f"{trial.elapsed_s:.0f} s", trial.get("budget_s")
        late = budget_s and trial.elapsed_s >= budget_s + 0.5
        parts.append(f"{took} of a budget of {budget_s:g} s" if late else took)
    alike = self_check_ratio(trial)
    copies = (
        f"; two copies of one step differ by {100 * abs(alike - 1):.1f}%"
        if alike
        else "; no step was timed against its own copy"
        if len(timed) > 1
        else ""
    )
    larger = any(arm.get("tokens_ratio", 1.0) > 1 for arm in timed)
    per_batch = " A larger batch's times are for as many tokens as the others'." if larger else ""
    return f"Timed: {', '.join(parts)}{copies}.{per_batch}"


def _depth(trial: Trial) -> str:
    """Say which depths were timed in place of the whole model; empty if it was timed."""
    if not trial.get("blocks"):
        return ""
    whole = " + ".join(str(count) for count in trial.blocks.values())
    cuts = next(arm.cuts for arm in trial.arms if arm.tried)
    depths = " and ".join(" + ".join(str(count) for count in cut.blocks.values()) for cut in cuts)
    return f"extrapolated from {depths} of {whole} blocks"


def _circumstances(trial: Trial) -> Iterator[str]:
    """Say where the trial ran, and with which budget."""
    timed = [arm for arm in trial.arms if arm.tried and not is_withdrawn(arm.name)]
    if timed and recorded(trial, "own_process"):
        where = "a process of its own" if trial.own_process else "your process, on copies of the model"
        yield f"The trial ran in {where}."
