"""The printed plan of a job beside what it promises and the best variant that plain scripts know, and what is
missed of it."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fp8doctor import load_report
from fp8doctor.analysis.noise import script_interval
from fp8doctor.analysis.trial_view import TrialView

PLAN, FIXED_BF16, RIVAL = "plan", "bf16_with_fixes", "rival "
"""Names of what plain scripts time beside the arms: the printed lines, and compiled BF16 with the fixes that
are not of FP8; how the names of variants begin that the trial need not know."""

GAP, PROMISE, COMMAND = 0.02, 0.03, 1.25
"""Bounds: the plan's time beyond the best variant and the promise's error, as shares; the seconds of the
whole command as a multiple of its budget."""

HELPS_BF16_TOO = ("checkpointing-off", "attention-sdpa", "cache-off", "adapters-to-bf16")

HEAD = (
    "| job | caches | plan | promised ms | plain ms | error | best known | plain ms | gap | command "
    "| not as printed |",
    "|---|---|---|---|---|---|---|---|---|---|---|",
)


def end_of(path: Path) -> dict[str, Any]:
    """Tell the name, time and memory of the variant that the plan of a report ends in; empty if none."""
    try:
        end = TrialView(load_report(path).facts).end
    except ValueError:
        return {}
    if end is None:
        return {}
    return {key: end.arm.get(key) for key in ("name", "step_ms", "peak_gib")}


def printed_intervals(path: Path) -> dict[str, tuple[float, float]]:
    """Return the interval that the report prints of each variant with a time."""
    trial = load_report(path).facts.trial
    known = {step.name: script_interval(step, trial) for step in trial.arms}
    return {name: (found.low, found.high) for name, found in known.items() if found}


def extra(report: Mapping[str, Any], path: Path) -> Iterator[tuple[str, list[str]]]:
    """List what plain scripts time of a report beside its arms."""
    steps = [each["treatment"]["name"] for each in report.get("prescription", ())]
    yield PLAN, [f"{PLAN}={path}"] if steps else []
    arms = (report["facts"].get("trial") or {}).get("arms", ())
    named = {*steps, *(name for arm in arms for name in arm.get("treatments") or ())}
    if fixes := [name for name in HELPS_BF16_TOO if name in named]:
        yield FIXED_BF16, ["bf16_compiled", *fixes]


def rivals(settings: Mapping[str, Any], can: Iterable[str]) -> Iterator[tuple[str, list[str]]]:
    """List BF16 and every recipe, each compiled by block and as a whole.

    Of a job that says its own ``RECIPE``, None for BF16; ``WHOLE = False`` is one too deep to be compiled as
    a whole.
    """
    if "RECIPE" not in settings:
        return
    own, can = settings["RECIPE"], set(can)
    forms = ["compile-blocks", *(["compile-model"] if settings.get("WHOLE", True) else [])]
    if "compile-model" in forms:
        yield f"{RIVAL}bf16 compile-model", ["bf16", "compile-model"]
    kinds = ("recipe-", "te-") if own else ("convert-",)
    recipes = sorted(name for name in can if name.startswith(kinds) and not named(name, own))
    for form in forms:
        if own:
            yield f"{RIVAL}{form}", [form]
        for recipe in recipes:
            yield f"{RIVAL}{recipe} {form}", ([form, recipe] if own else [recipe, form])


def named(change: str, recipe: str | None) -> bool:
    return recipe is not None and change.partition("-")[2] == recipe.replace("_", "-")


def row(
    label: str, path: Path, report: Mapping[str, Any], plain: Mapping[str, Any], seconds: float
) -> tuple[str, list[str]]:
    """Write the line of one report's plan, and what it misses."""
    end, known = end_of(path), plain.get(PLAN, {})
    promised, applied = end.get("step_ms"), known.get("step_ms")
    timed = {name: each["step_ms"] for name, each in plain.items() if each.get("step_ms")}
    best = min(timed, key=lambda name: timed[name], default="")
    error = promised / applied - 1 if promised and applied else None
    gap = applied / timed[best] - 1 if applied else None
    budget = report["facts"]["trial"].get("budget_s")
    took = seconds / budget if budget else None
    names = ", ".join(each["treatment"]["name"] for each in report.get("prescription", ())) or "nothing"
    cells = (
        f"{names} ({end.get('name', 'no end')})",
        ms(promised),
        ms(applied) or str(known.get("error", "not run"))[:200].replace("|", "/").replace("\n", " "),
        percent(error),
        best,
        ms(timed.get(best)),
        percent(gap),
        f"{seconds:.0f} s" + (f", {took:.2f} of the budget" if took is not None else ""),
        otherwise(known.get(PLAN) or {}),
    )
    missed = [
        *([f"{label}: plan {percent(gap)} beyond {best}"] if gap is not None and gap > GAP else []),
        *([f"{label}: promise {percent(error)}"] if error is not None and abs(error) > PROMISE else []),
        *([f"{label}: command {took:.2f} of its budget"] if took is not None and took > COMMAND else []),
        *([f"{label}: the plan fails"] if "error" in known else []),
    ]
    return f"| {label.replace(' ', ' | ')} | {' | '.join(cells)} |", missed


def otherwise(applied: Mapping[str, Any]) -> str:
    """Name the steps that were not executed as they are printed."""
    words = {"by_hand": "by hand", "skipped": "skipped", "conversions": "the last conversion counts"}
    return "; ".join(f"{said}: {', '.join(applied[key])}" for key, said in words.items() if applied.get(key))


def ms(value: float | None) -> str:
    return f"{value:.1f}" if value else ""


def percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:+.1f} %"
