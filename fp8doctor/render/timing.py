"""The table of measured steps: one row for each arm of the trial, in milliseconds and GiB."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from fp8doctor.facts import Arm, Facts, Trial, recorded
from fp8doctor.measured import FIRST, uses_fp8
from fp8doctor.overview import plural


@dataclass(frozen=True)
class Row:
    """One arm, as it is shown."""

    label: str
    step: str
    """Milliseconds a step with half the width of its 90 % interval; empty when it was not timed."""
    memory: str
    """Peak in GiB; empty on a CPU."""
    note: str
    """Why it was not timed; empty otherwise."""


@dataclass(frozen=True)
class Timing:
    """The table and the sentence under it that says how it was measured."""

    rows: tuple[Row, ...]
    basis: str


def timing(facts: Facts) -> Timing | None:
    """The measured steps; None when there was no trial or it has no rows."""
    if not recorded(facts.trial) or not facts.trial.arms:
        return None
    fp8 = recorded(facts.network) and uses_fp8(facts)
    order = {"bf16": 0, "bf16_compiled": 1, "as_is": 1.5 if fp8 else -1, "prescribed": 2}
    shown = [arm for arm in facts.trial.arms if not arm.name.endswith(FIRST)]
    arms = sorted(shown, key=lambda arm: order.get(arm.name, 3))
    return Timing(_together([_row(arm, fp8) for arm in arms]), _basis(facts.trial))


MANY = 3
"""Rows without a time that say the same and stand in one line from this number on."""


def _together(rows: list[Row]) -> tuple[Row, ...]:
    """The rows, those without a time that share a long list's reason counted in one at its first place."""
    shared = Counter(row.note for row in rows if row.note)
    shown: list[Row] = []
    for row in rows:
        if shared[row.note] < MANY:
            shown.append(row)
        elif all(each.note != row.note for each in shown):
            shown.append(Row(f"{shared[row.note]} more variants", "", "", row.note))
    return tuple(shown)


def label(name: str, fp8: bool) -> str:
    """What an arm is called: ``FP8, as it is``, ``BF16, compiled``, ``FP8, prescribed``."""
    named = {
        "as_is": f"{'FP8, a' if fp8 else 'A'}s it is",
        "bf16": "BF16",
        "bf16_compiled": "BF16, compiled",
        "bf16_without_checkpointing": "BF16, checkpointing off",
        "prescribed": "FP8, prescribed",
        "combination": "FP8, all that gained",
        "without_adapters": "without adapters",
    }
    if name in named:
        return named[name]
    return f"FP8, {name.removeprefix('float8_')}, compiled" if name.startswith("float8_") else name.replace("-", " ")


def _row(arm: Arm, fp8: bool) -> Row:
    if not arm.tried or not arm.step_ms:
        return Row(label(arm.name, fp8), "", "", f"not timed: {arm.reason or 'no reason given'}")
    spread = f" ± {(arm.high_ms - arm.low_ms) / 2:.1f}" if arm.high_ms and arm.low_ms else ""
    return Row(label(arm.name, fp8), f"{arm.step_ms:,.1f}{spread}", f"{arm.peak_gib:.1f}" if arm.peak_gib else "", "")


def _basis(trial: Trial) -> str:
    """How the times were taken: ``Timed: 4 variants, whole, 31 s.`` or ``... predicted from 4 and 12 of 32 blocks ...``."""
    timed = [arm for arm in trial.arms if arm.tried and not arm.name.endswith(FIRST)]
    if not timed:
        return ""
    parts = [f"{plural(len(timed), 'variant')} in turn on {trial.gpu or 'the CPU'}"]
    if trial.blocks:
        whole = " + ".join(str(count) for count in trial.blocks.values())
        cuts = " and ".join(" + ".join(str(count) for count in cut.blocks.values()) for cut in timed[0].cuts)
        parts.append(f"full depth predicted from {cuts} of {whole} blocks")
    else:
        parts.append("the whole model")
    if trial.elapsed_s:
        parts.append(f"{trial.elapsed_s:.0f} s")
    if trial.self_check_ratio:
        parts.append(f"a copy of BF16 came out at {trial.self_check_ratio:.3f} of it")
    apart = [label(arm.name, True) for arm in timed if recorded(arm.beside) and arm.beside]
    alone = f" Memory did not hold all at once: {', '.join(apart)} took turns with BF16 only." if apart else ""
    return f"Timed: {', '.join(parts)}.{alone}"
