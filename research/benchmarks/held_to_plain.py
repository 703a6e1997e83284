"""What `trial_jobs.py` found, as Markdown: every arm of a trial beside its plain script, and the bounds that
it misses. Reads the files of its folder alone, so a killed run has a table too."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import plan_table

TIME, MEDIAN_TIME, MEMORY = 0.02, 0.01, 0.01
"""Bounds as shares. Time is held where the GPU sets the pace."""

IDLE = 0.10
"""The GPU sets the pace of a step in which it runs nothing for at most this share. A convention of this
tool."""

COLD_S, WARM_S = 60.0, 30.0
"""Seconds of a trial, loading not counted, with empty compile caches and with those of the run before. A job
may have its own ``COLD_S``."""

EVEN = 0.03
"""A speedup this close to 1 is even, as in the verdict; a time whose own interval is this narrow is told
closely."""

LARGE = 1e9
"""Parameters from which on every question has to be asked."""

BF16 = ("bf16", "bf16_compiled", "bf16_as_compiled")
"""Arms whose plain change has the arm's own name. All others are made of their treatments."""

ALIKE = {"bf16_without_checkpointing": "checkpointing-off", "bf16_cuda_graphs": "cuda-graphs"}
"""Arms without treatments that are their base and one change by hand."""

UNASKED = ("no_time_left", "not_expected_to_fit", "still_compiling")
"""Reasons of an arm that the budget left out; others say that it does not apply or cannot be timed."""

NOT_AN_ANSWER = ("bf16_again",)
NOT_ARMS = (plan_table.PLAN, plan_table.FIXED_BF16, plan_table.RIVAL)
NOT_RUN = "not run"
"""What is said of a plain script that was wanted and that the end of the run came before."""

KEEP = "keep-in-bf16"
NAMED = ("torchao", "transformer_engine", "transformers")
"""Packages whose versions stand above the tables."""


@dataclass
class Held:
    """One job: lines of both tables, and what it misses."""

    variants: list[str] = field(default_factory=list)
    summary: list[str] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)
    relied_on: list[float] = field(default_factory=list)
    """Those of the errors that are of trials which call their times reliable."""
    told_closely: list[float] = field(default_factory=list)
    """Those of the errors whose times the trial gives an interval within `EVEN` of them."""
    in_interval: list[bool] = field(default_factory=list)
    """Whether the trial's interval holds the plain time, where there is one and the GPU sets the pace."""
    memory_errors: list[float] = field(default_factory=list)
    plans: list[str] = field(default_factory=list)


def arms_of(report: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """List the arms by name, without what the trial only checks itself with."""
    return {
        name: arm
        for name, arm in every_arm(report).items()
        if name not in NOT_AN_ANSWER and not name.endswith("_first")
    }


def every_arm(report: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """List all arms by name: the base of an answer may be none itself."""
    return {arm["name"]: arm for arm in (report["facts"].get("trial") or {}).get("arms", ())}


def changes_of(name: str, report: Mapping[str, Any]) -> list[str] | None:
    """List what a user changes in the job by hand for this arm; None where nothing names it."""
    if name == "as_is":
        return []
    if name in BF16:
        return [name]
    arm = every_arm(report).get(name)
    if arm is None:
        return None
    base = changes_of(arm["base"], report) if arm.get("base") else []
    own = [ALIKE[name]] if name in ALIKE else list(arm.get("treatments") or ())
    if base is None or not own:
        return None
    own = [with_layers(each, report) for each in own if each not in base]
    return [*base, *own] if all(own) else None


def with_layers(treatment: str, report: Mapping[str, Any]) -> str:
    """Add the layers that the report names to a treatment that needs them; empty where it names none."""
    if treatment != KEEP:
        return treatment
    said = (each.get("treatment") for each in (*report.get("prescription", ()), *report.get("findings", ())))
    layers = next((each["layers"] for each in said if each and each["name"] == KEEP and each["layers"]), ())
    return f"{KEEP}={','.join(layers)}" if layers else ""


def wanted(
    report: Mapping[str, Any] | None,
    can: Iterable[str],
    path: Path | None = None,
    settings: Mapping[str, Any] | None = None,
) -> dict[str, list[str]]:
    """Choose what plain scripts time: the step as it is and BF16 always, other arms where they have a number,
    then the plan that the report at ``path`` prints, and rivals that no arm is."""
    can, found = set(can), {"as_is": [], **{name: [name] for name in BF16}}
    if report is not None:
        timed = [name for name, arm in arms_of(report).items() if arm.get("tried") and arm.get("step_ms")]
        found |= {name: changes for name in timed if (changes := changes_of(name, report)) is not None}
        found |= dict(plan_table.extra(report, path)) if path else {}
    made = {frozenset(changes) for changes in found.values()}
    for name, changes in plan_table.rivals(settings or {}, can):
        if frozenset(changes) not in made:
            found[name] = changes
    return {
        name: changes
        for name, changes in found.items()
        if all(change.partition("=")[0] in can for change in changes)
    }


def hold(folder: Path, settings: Mapping[str, Any]) -> Held:
    """Hold one job's reports to its plain scripts."""
    held, plain = Held(), read(folder / "plain.json") or {}
    runs, name = read(folder / "runs.json") or {}, folder.name
    if "skipped" in runs:
        held.summary.append(f"| {name} | | skipped: {runs['skipped']} | | | | |")
        return held
    for kind in ("cold", "warm"):
        if kind not in runs:
            continue
        report = read(folder / f"{kind}.json")
        if report is None or not arms_of(report):
            why = runs[kind].get("error") or (report or {}).get("verdict", {}).get("summary", "no report")
            held.summary.append(f"| {name} | {kind} | no trial: {cell(why)} | | | | |")
            held.missed.append(f"{name} {kind}: no trial")
            for variant, known in plain.items():
                hold_arm(held, f"{name} {kind} | {variant}", None, known)
            continue
        arms = {arm: known for arm, known in plain.items() if not arm.startswith(NOT_ARMS)}
        printed = plan_table.printed_intervals(folder / f"{kind}.json")
        for arm in every_arm(report).values():
            arm["low_ms"], arm["high_ms"] = printed.get(arm["name"], (None, None))
        hold_report(held, f"{name} {kind}", report, arms, seconds_allowed(kind, settings))
        path, seconds = folder / f"{kind}.json", runs[kind]["seconds"]
        line, missed = plan_table.row(f"{name} {kind}", path, report, plain, seconds)
        held.plans.append(line)
        held.missed += missed
    return held


def seconds_allowed(kind: str, settings: Mapping[str, Any]) -> float:
    return float(settings.get("COLD_S", COLD_S)) if kind == "cold" else WARM_S


def hold_report(
    held: Held, label: str, report: Mapping[str, Any], plain: Mapping[str, Any], allowed_s: float
) -> None:
    """Add what one report says, and what it misses."""
    arms, trial, status = arms_of(report), report["facts"]["trial"], report["verdict"]["status"]
    before = len(held.errors)
    counted: set[tuple[Any, ...]] = set()
    for name in dict.fromkeys((*plain, *arms)):
        arm, known = arms.get(name), plain.get(name)
        timing = (arm.get("step_ms"), *known.get("changes", (name,))) if arm and known else (name,)
        hold_arm(held, f"{label} | {name}", arm, known, again=timing in counted)
        counted.add(timing)
    held.relied_on += held.errors[before:] if trial.get("reliable") else []
    converts = status == "no_fp8"
    told, true = speedup(arms, converts), speedup(plain, converts)
    sign = sign_held(status, told, true)
    unasked = {name: arm for name, arm in arms.items() if not arm.get("tried") and arm.get("why") in UNASKED}
    refused = {name: arm for name, arm in arms.items() if not arm.get("tried") and name not in unasked}
    elapsed = trial.get("elapsed_s") or 0.0
    held.summary.append(
        f"| {label.replace(' ', ' | ')} | {status} | {number(told)} | {number(true)} | {sign} "
        f"| {elapsed:.0f} of {allowed_s:.0f} s | {len(arms) - len(unasked) - len(refused)} of {len(arms)}"
        f"{reasons('not asked', unasked)}{reasons('cannot be timed', refused)} |"
    )
    held.missed += [f"{label}: sign {sign}"] if sign != "right" else []
    held.missed += [f"{label}: verdict {status}"] if status in ("open",) else []
    held.missed += [f"{label}: {elapsed:.0f} s"] if elapsed > allowed_s else []
    large = (report["facts"]["network"].get("parameters") or 0) >= LARGE
    held.missed += [f"{label}: not asked: {', '.join(unasked)}"] if large and unasked else []


def hold_arm(
    held: Held,
    label: str,
    arm: Mapping[str, Any] | None,
    known: Mapping[str, Any] | None,
    *,
    again: bool = False,
) -> None:
    """Add the line of one arm beside its plain script.

    ``again`` is for a timing that another name has told: it counts once.
    """
    if arm is None or not arm.get("tried") or not arm.get("step_ms"):
        why = cell(arm.get("reason") or "no time") if arm else "the trial has no such arm"
        true = f"{known['step_ms']:.1f}" if known and "step_ms" in known else ""
        held.variants.append(f"| {label} | – | {true} | | | | {why} |")
        return
    if known is None or "step_ms" not in known:
        why = cell(known.get("error", NOT_RUN)) if known else "no plain script"
        held.variants.append(f"| {label} | {arm['step_ms']:.1f} | – | | | | {why} |")
        return
    error, idle = arm["step_ms"] / known["step_ms"] - 1, idle_of(arm, known)
    paced_by_gpu = idle is not None and idle <= IDLE
    half = half_interval(arm)
    told = f"{arm['step_ms']:.1f}" + ("" if half is None else f" ± {half:.1f}")
    line = f"| {label} | {told} | {known['step_ms']:.1f} | {percent(error)} "
    memory = None
    if arm.get("peak_gib") and known.get("peak_gib"):
        memory = arm["peak_gib"] / known["peak_gib"] - 1
    if memory is not None and not again:
        held.memory_errors.append(abs(memory))
        held.missed += [f"{label}: memory {percent(memory)}"] if abs(memory) > MEMORY else []
    if paced_by_gpu and not again:
        held.errors.append(abs(error))
        if half is not None:
            held.told_closely += [abs(error)] if half <= EVEN * arm["step_ms"] else []
            held.in_interval.append(arm["low_ms"] <= known["step_ms"] <= arm["high_ms"])
        held.missed += [f"{label}: time {percent(error)}"] if abs(error) > TIME else []
    note = "" if paced_by_gpu else "the host sets the pace" if idle is not None else "idle time unknown"
    held.variants.append(f"{line}| {percent(memory)} | {percent(idle)} | {note} |")


def half_interval(arm: Mapping[str, Any]) -> float | None:
    """Return half of the printed interval in ms; None where there is none."""
    return (arm["high_ms"] - arm["low_ms"]) / 2 if arm.get("low_ms") and arm.get("high_ms") else None


def idle_of(arm: Mapping[str, Any], known: Mapping[str, Any]) -> float | None:
    """Tell the share of the step in which the GPU runs nothing, in the plain script, else in the trial."""
    if known.get("idle_share") is not None:
        return float(known["idle_share"])
    parts = arm.get("breakdown") or {}
    return parts["idle_ms"] / arm["step_ms"] if parts.get("idle_ms") is not None else None


def speedup(steps: Mapping[str, Mapping[str, Any]], converts: bool) -> float | None:
    """Divide the best BF16 by the step as it is, or by the best conversion of a model without FP8."""
    timed = {name: each["step_ms"] for name, each in steps.items() if each.get("step_ms")}
    baselines = [timed[name] for name in (*BF16, *(["as_is"] if converts else [])) if name in timed]
    fp8 = [ms for name, ms in timed.items() if name.startswith("float8_" if converts else "as_is")]
    return min(baselines) / min(fp8) if baselines and fp8 else None


def sign_held(status: str, told: float | None, true: float | None) -> str:
    """Say what became of the sign. A verdict that calls its own times too noisy tells none."""
    if told is None or true is None:
        return "?"
    if status == "too_noisy":
        return "not told"
    return "right" if same_sign(told, true) else "WRONG"


def same_sign(told: float, true: float) -> bool:
    """Whether both say faster, slower or even; beside the edge of even, whether both say much the same."""
    return sign_of(told) == sign_of(true) or (
        sign_of(told) * sign_of(true) == 0 and abs(told / true - 1) <= TIME
    )


def sign_of(speedup: float) -> int:
    return 0 if abs(speedup - 1) < EVEN else 1 if speedup > 1 else -1


def table(out: Path, settings: Mapping[str, Mapping[str, Any]]) -> tuple[str, list[str]]:
    """Write all that the folder holds as Markdown; returns what was missed beside it."""
    held = [hold(out / name, own) for name, own in settings.items() if (out / name).is_dir()]
    missed = [each for one in held for each in one.missed]
    errors, relied_on, closely, in_interval, memory = (
        [*each_of(held, what)]
        for what in ("errors", "relied_on", "told_closely", "in_interval", "memory_errors")
    )
    if errors and statistics.median(errors) > MEDIAN_TIME:
        missed.append(f"median time error {percent(statistics.median(errors))}")
    lines = [
        *ran_on(out),
        "",
        "| job | caches | verdict | speedup, predicted | plain | sign | trial | arms asked |",
        "|---|---|---|---|---|---|---|---|",
        *(line for each in held for line in each.summary),
        "",
        *plan_table.HEAD,
        *(line for each in held for line in each.plans),
        "",
        "| job, caches | variant | predicted ms | plain ms | error | memory error | idle | |",
        "|---|---|---|---|---|---|---|---|",
        *(line for each in held for line in each.variants),
        "",
        f"Time where the GPU sets the pace (idle for at most {percent(IDLE)} of the step): {spread(errors)}. "
        f"In trials that call their times reliable: {spread(relied_on)}. Where the trial's own interval is "
        f"within {percent(EVEN)}: {spread(closely)}; {sum(in_interval)} of {len(in_interval)} intervals hold "
        f"the plain time. Memory: {spread(memory)}.",
        "",
        "Missed:" if missed else "Every bound held.",
        *(f"- {each.replace(' | ', ' ')}" for each in missed),
    ]
    return "\n".join(lines) + "\n", missed


def ran_on(out: Path) -> list[str]:
    """Name the GPUs and versions of all reports, each once."""
    found = (report["facts"] for path in sorted(out.glob("*/cold.json")) if (report := read(path)))
    return list(dict.fromkeys(map(machine_of, found)))


def machine_of(facts: Mapping[str, Any]) -> str:
    software = facts["software"]
    gpus = [gpu["name"] for gpu in facts["gpus"] if gpu.get("visible")][:1] or ["no GPU"]
    packages = [f"{name} {each['version']}" for name, each in software["packages"].items() if name in NAMED]
    return " · ".join((*gpus, f"torch {software['torch']}", *packages, f"Python {software['python']}"))


def each_of(held: Sequence[Held], what: str) -> Iterator[float]:
    for one in held:
        yield from getattr(one, what)


def spread(errors: Sequence[float]) -> str:
    if not errors:
        return "nothing to compare"
    median, worst = percent(statistics.median(errors)), percent(max(errors))
    return f"median {median}, worst {worst} of {len(errors)}"


def reasons(what: str, arms: Mapping[str, Mapping[str, Any]]) -> str:
    """Name the arms that were not tried, with their reasons."""
    said = "; ".join(
        f"{name} ({cell(arm.get('reason') or arm.get('why') or '')})" for name, arm in arms.items()
    )
    return f"; {what}: {said}" if said else ""


def cell(text: str) -> str:
    """Make text fit a cell of a table."""
    return " ".join(str(text).replace("|", "/").split())[:200]


def percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f} %"


def number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}x"


def read(path: Path) -> Any:
    """Read a JSON file; None where it is missing or half written."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None
