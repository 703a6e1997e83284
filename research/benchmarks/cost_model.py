"""The modelled step held to steps measured on an H200, beside torchao's own roofline: ``python
research/benchmarks/cost_model.py [FOLDER...]``

Prints Markdown. Every row of measured/h200_steps: its time, and its ratio to compiled BF16 of the same
job, as estimated by `fp8doctor.cost.step_cost` and by torchao's ``roofline_utils``. Tables 2.1 and
2.2 have bounds (`BOUND`, right sign, nearer than torchao); the others are shown. Then the reports of timed
models in FOLDERs (tests/patients/recorded, and recorded/ beside this file): what a user without a GPU would
have been told of each (`fp8doctor.analysis.modelled_speedup`) beside what its trial measured (bound: by how
much it says that it may be off), the time of each arm, and, where arms were profiled, its GEMMs and what runs
between them. A trial that calls its own times unreliable holds nothing. `recorded_steps.CALIBRATED` names
those that constants come from.

torchao knows GEMMs and casts of Linears alone, no H200, and no difference between eager and compiled but
fusion. It is given its H100 with the H200's bandwidth, and fusion for compiled arms. So its errors are given
for the rows that it has something to say about, too: compiled FP8 without checkpointing.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

from tabulate import tabulate

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fp8doctor.gpus import gpu_spec
from research.benchmarks.measured_steps import Row, gemm_errors, rows, swept
from research.benchmarks.recorded_steps import JOBS, PATIENTS, Recorded, Told, recorded_arms, told

BOUND = 0.35
"""Largest error of time and ratio, as a share."""

BOUNDED = ("2.1", "2.2")
"""Tables that the bound holds for."""


def sign(row: Row) -> str:
    """Whether faster and slower are told apart; a row that is even has no sign to get right."""
    if row.is_baseline:
        return ""
    return ("right" if row.right_sign else "wrong") + (" (even)" if row.is_even else "")


def mean(errors: Iterator[float]) -> float:
    return statistics.mean(abs(error) for error in errors)


def percent(share: float) -> str:
    return f"{100 * share:+.0f} %"


def main() -> int:
    """Print the tables; 1 when a bound is missed."""
    every = rows()
    missed = []
    for table in dict.fromkeys(row.table for row in every):
        here = [row for row in every if row.table == table]
        print(f"\n## Table {table}\n")
        header = (
            "job",
            "arm",
            "ms",
            "modelled",
            "error",
            "ratio",
            "modelled",
            "error",
            "sign",
            "torchao",
            "error",
        )
        cells = [
            (
                row.job,
                row.arm,
                f"{row.ms:.1f}",
                f"{row.modelled_ms:.1f}",
                percent(row.time_error),
                f"{row.ratio:.2f}",
                f"{row.modelled_ratio:.2f}",
                "" if row.is_baseline else percent(row.error),
                sign(row),
                f"{row.torchao_ratio:.2f}",
                "" if row.is_baseline else percent(row.torchao_error),
            )
            for row in here
        ]
        print(tabulate(cells, header, tablefmt="github", disable_numparse=True))
    print("\n## Mean error of the ratio\n")
    lines = []
    for label, chosen in (
        ("2.1 and 2.2", [row for row in every if row.table in BOUNDED]),
        ("the others", [row for row in every if row.table not in BOUNDED]),
    ):
        held = [row for row in chosen if not row.is_baseline]
        modest = [row for row in held if row.torchao_says_something]
        for what, some in ((f"{label}, every arm", held), (f"{label}, compiled torchao arms", modest)):
            ours, theirs = mean(row.error for row in some), mean(row.torchao_error for row in some)
            signs = (
                sum(row.right_sign for row in some),
                sum((row.ratio > 1) == (row.torchao_ratio > 1) for row in some),
            )
            lines.append(
                (
                    what,
                    len(some),
                    f"{100 * ours:.1f} %",
                    f"{signs[0]} of {len(some)}",
                    f"{100 * theirs:.1f} %",
                    f"{signs[1]} of {len(some)}",
                )
            )
            if label == "2.1 and 2.2" and ours >= theirs:
                missed.append(f"{what}: torchao is nearer")
        if label == "2.1 and 2.2":
            missed += [
                f"{row.job} {row.arm}: {percent(row.error)}"
                for row in held
                if abs(row.error) > BOUND or not (row.right_sign or row.is_even)
            ]
            missed += [
                f"{row.job} {row.arm}: time {percent(row.time_error)}"
                for row in chosen
                if abs(row.time_error) > BOUND
            ]
    print(
        tabulate(
            lines,
            ("rows", "count", "fp8doctor", "right sign", "torchao", "right sign"),
            tablefmt="github",
            disable_numparse=True,
        )
    )
    folders = tuple(map(Path, sys.argv[1:])) or (PATIENTS, JOBS)
    said = list(told(folders))
    print_told(said)
    missed += [f"{row.patient}: told {percent(row.error)}" for row in said if row.is_missed]
    print_arms(list(recorded_arms(folders)))
    print("\n## Mean error of a GEMM's time\n")
    lines = [
        (label, count, f"{100 * ours:.0f} %", f"{100 * theirs:.0f} %")
        for label, count, ours, theirs in gemm_errors(swept(), gpu_spec("H200"))
    ]
    print(
        tabulate(lines, ("GEMMs", "count", "fp8doctor", "torchao"), tablefmt="github", disable_numparse=True)
    )
    print("\n" + (f"Missed: {'; '.join(missed)}" if missed else "Every bound held."))
    return bool(missed)


def print_told(rows: list[Told]) -> None:
    """Best BF16 / FP8 as it is, per patient."""
    print("\n## Best BF16 / FP8 as it is, of recorded patients\n")
    cells = [
        (
            row.patient,
            row.use,
            f"{row.measured:.3f}",
            f"{row.modelled:.3f}" if row.modelled else "nothing",
            percent(row.error) if row.modelled else "",
            percent(row.may_be_off).lstrip("+") if row.modelled else "",
            row.sign if row.reliable else "the trial is unreliable",
        )
        for row in rows
    ]
    print(
        tabulate(
            cells,
            ("patient", "use", "measured", "told", "error", "may be off by", "sign"),
            tablefmt="github",
            disable_numparse=True,
        )
    )
    print()
    for label in ("calibrated", "held out"):
        some = [row for row in rows if row.is_held and row.use == label]
        errors = [abs(row.error) for row in some]
        right = sum(row.sign in ("right", "even") for row in some)
        print(
            f"Told and {label}: {len(some)}, error in the median {100 * statistics.median(errors):.1f} %, "
            f"in the mean {100 * statistics.mean(errors):.1f} %, at most {100 * max(errors):.0f} %; "
            f"sign right or even: {right}.\n"
        )


def print_arms(arms: list[Recorded]) -> None:
    """Time, GEMMs and what lies between, per arm."""
    print("\n## Arms of recorded trials (ms)\n")
    cells = [
        (
            a.patient,
            a.arm,
            a.use,
            f"{a.ms:.1f}",
            f"{a.modelled_ms:.1f}",
            percent(a.error),
            *pair(a.gemms),
            *pair(a.between),
        )
        for a in arms
    ]
    header = (
        "patient",
        "arm",
        "use",
        "step",
        "modelled",
        "error",
        "GEMMs",
        "modelled",
        "error",
        "casts, pointwise, loss",
        "modelled",
        "error",
    )
    print(tabulate(cells, header, tablefmt="github", disable_numparse=True))
    for label in ("calibrated", "held out"):
        some = [each for each in arms if each.use == label]
        times = {
            "step": [(each.ms, each.modelled_ms) for each in some],
            "GEMMs": [each.gemms for each in some if each.gemms],
            "casts, pointwise, loss": [each.between for each in some if each.between],
        }
        errors = {
            what: [abs(modelled / ms - 1) for ms, modelled in pairs if ms] for what, pairs in times.items()
        }
        said = "; ".join(
            f"{what}: {100 * statistics.median(found):.1f} % over {len(found)}"
            for what, found in errors.items()
            if found
        )
        print(f"\nMedian error, {label}: {said}.")


def pair(times: tuple[float, float] | None) -> tuple[str, str, str]:
    return (
        (f"{times[0]:.1f}", f"{times[1]:.1f}", percent(times[1] / times[0] - 1))
        if times and times[0]
        else ("", "", "")
    )


if __name__ == "__main__":
    sys.exit(main())
