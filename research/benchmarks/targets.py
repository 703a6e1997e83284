"""Hold what `trial_jobs.py` left in a folder to the targets of eight jobs: ``targets.py OUT``

Prints what was told of every variant beside its plain script, every plan beside the best variant known, and a
line a target. Exits with 1 when a target is missed.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import plan_table
from held_to_plain import (
    IDLE,
    MEMORY,
    arms_of,
    cell,
    idle_of,
    number,
    percent,
    read,
    sign_held,
    speedup,
)
from trial_jobs import JOBS, settings_of

MEDIAN_TIME = 0.007
"""Bound of the median error, as a share."""

INTERVALS = 0.9
"""So large a share of the intervals holds the plain time."""

OPEN = ("open", "too_noisy")
"""Verdicts that tell no sign, and say so."""


@dataclass
class Told:
    """What the reports of a folder say that plain scripts know."""

    errors: list[float] = field(default_factory=list)
    paced_by_gpu: list[float] = field(default_factory=list)
    """Those of the errors that are of steps whose pace the GPU sets."""
    in_interval: list[bool] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)


def lines_of(
    name: str, folder: Path, told: Told, targets: dict[str, dict[str, bool | None]]
) -> Iterator[str]:
    """Write the lines of one job's variants, and what it is to the targets: None is not known."""
    report, plain, runs = (read(folder / f"{each}.json") or {} for each in ("cold", "plain", "runs"))
    trial = report.get("facts", {}).get("trial") or {}
    took, budget = (runs.get("cold") or {}).get("seconds"), trial.get("budget_s")
    targets["command within 1.25 budgets"][name] = took / budget <= plan_table.COMMAND if budget else None
    if not trial:
        yield f"| {name} | no trial: {cell((runs.get('cold') or {}).get('error') or '')} | | | | | | | |"
    arms, printed = arms_of(report) if trial else {}, {}
    if trial:
        printed = plan_table.printed_intervals(folder / "cold.json")
    seen: set[tuple[Any, ...]] = set()
    memory: list[float] = []
    for variant, known in plain.items():
        arm = arms.get(variant) or {}
        said, true = arm.get("step_ms"), known.get("step_ms")
        low, high = printed.get(variant, (None, None))
        interval = f"{ms(low)} to {ms(high)}" if low is not None else ""
        error = said / true - 1 if said and true else None
        holds = low <= true <= high if true and low is not None else None
        more = (
            arm["peak_gib"] / known["peak_gib"] - 1 if arm.get("peak_gib") and known.get("peak_gib") else None
        )
        timing = (said, *known["changes"])
        if error is not None and timing not in seen:  # a timing that two names tell counts once
            told.errors.append(abs(error))
            idle = idle_of(arm, known)
            told.paced_by_gpu += [abs(error)] if idle is not None and idle <= IDLE else []
            told.in_interval += [holds] if holds is not None else []
            memory += [abs(more)] if more is not None else []
        seen.add(timing)
        yield (
            f"| {name} | {variant} | {ms(said)} | {interval} | {ms(true)} | {percent(error)} "
            f"| {'' if holds is None else 'yes' if holds else 'NO'} | {percent(more)} "
            f"| {percent(known.get('idle_share'))} | {cell(known.get('error') or '')} |"
        )
    for variant in arms.keys() - plain.keys():
        yield f"| {name} | {variant} | {ms(arms[variant].get('step_ms'))} | | no plain script | | | | | |"
    told.memory += memory
    targets["memory within 1 %"][name] = max(memory) <= MEMORY if memory else None
    times = {each: known["step_ms"] for each, known in plain.items() if known.get("step_ms")}
    literal, best = times.get(plan_table.PLAN), min(times.values(), default=None)
    targets["plan within 2 % of the best variant"][name] = (
        literal / best - 1 <= plan_table.GAP if literal and best else None
    )
    status = (report.get("verdict") or {}).get("status", "")
    converts = in_bf16(name)
    targets["sign, or an open verdict"][name] = sign_is_honest(status, arms, plain, converts=converts)
    if converts:
        timed = any(name.startswith("float8_") and arm.get("step_ms") for name, arm in arms.items())
        targets["BF16 job answered"][name] = timed and status not in OPEN


def in_bf16(name: str) -> bool:
    return settings_of(JOBS / f"{name}.py").get("RECIPE") is None


def sign_is_honest(
    status: str, arms: Mapping[str, Any], plain: Mapping[str, Any], *, converts: bool
) -> bool | None:
    """Tell whether the sign is right or called open; None where one of both is not known."""
    arms_alone = {name: known for name, known in plain.items() if name in arms}
    held = sign_held(status, speedup(every(arms), converts), speedup(arms_alone, converts))
    return True if status in OPEN or held == "right" else None if held == "?" else False


def every(arms: Mapping[str, Any]) -> Mapping[str, Any]:
    return {name: arm for name, arm in arms.items() if arm.get("tried")}


def plan_line(name: str, folder: Path) -> Iterator[str]:
    """Write the line of the job's plan."""
    report, plain, runs = (read(folder / f"{each}.json") or {} for each in ("cold", "plain", "runs"))
    if (report.get("facts") or {}).get("trial"):
        line, _ = plan_table.row(f"{name} cold", folder / "cold.json", report, plain, runs["cold"]["seconds"])
        yield line


def sign_line(name: str, folder: Path) -> str:
    """Write the verdict beside the speedup of the plain scripts of the same variants."""
    report, plain = (read(folder / f"{each}.json") or {} for each in ("cold", "plain"))
    arms = every(arms_of(report)) if report else {}
    alike = {each: known for each, known in plain.items() if each in arms}
    told, true = (number(speedup(steps, in_bf16(name))) for steps in (arms, alike))
    return f"- {name}: {(report.get('verdict') or {}).get('status', 'no report')}, told {told}, plain {true}"


def target_lines(told: Told, targets: Mapping[str, Mapping[str, bool | None]]) -> Iterator[tuple[str, bool]]:
    """Write a line a target, and whether it holds."""
    for target, jobs in targets.items():
        right, unknown = sum(each is True for each in jobs.values()), [j for j in jobs if jobs[j] is None]
        missed = [job for job in jobs if jobs[job] is False]
        why = "".join(
            f"; {what}: {', '.join(names)}"
            for what, names in (("missed", missed), ("unknown", unknown))
            if names
        )
        yield f"{target}: {right} of {len(jobs)}{why}", right == len(jobs)
    if told.errors:
        median = statistics.median(told.errors)
        paced = statistics.median(told.paced_by_gpu) if told.paced_by_gpu else None
        yield (
            f"median error {percent(median)} of {len(told.errors)}, worst {percent(max(told.errors))}; "
            f"where the GPU sets the pace {percent(paced)} of {len(told.paced_by_gpu)}, "
            f"worst {percent(max(told.paced_by_gpu, default=None))}",
            median <= MEDIAN_TIME,
        )
        share = sum(told.in_interval) / len(told.in_interval) if told.in_interval else 0.0
        yield f"intervals that hold: {sum(told.in_interval)} of {len(told.in_interval)}", share >= INTERVALS
        yield (
            f"memory: worst {percent(max(told.memory, default=None))}",
            max(told.memory, default=0.0) <= MEMORY,
        )


def ms(value: float | None) -> str:
    return f"{value:.2f}" if value else ""


def main(out: str) -> int:
    """Print the tables."""
    folders = sorted(path.parent for path in Path(out).glob("*/runs.json"))
    told = Told()
    targets: dict[str, dict[str, bool | None]] = {
        "plan within 2 % of the best variant": {},
        "sign, or an open verdict": {},
        "BF16 job answered": {},
        "memory within 1 %": {},
        "command within 1.25 budgets": {},
    }
    print("| job | variant | told ms | interval | plain ms | error | holds | memory | idle | |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    show(line for folder in folders for line in lines_of(folder.name, folder, told, targets))
    print()
    show(plan_table.HEAD)
    show(line for folder in folders for line in plan_line(folder.name, folder))
    print()
    show(sign_line(folder.name, folder) for folder in folders)
    print()
    held = list(target_lines(told, targets))
    show(f"- {'held' if right else 'MISSED'}: {line}" for line, right in held)
    return int(not all(right for _, right in held))


def show(lines: Iterable[str]) -> None:
    for line in lines:
        print(line)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
