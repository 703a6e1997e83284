"""Hold the trial's predictions to plain scripts on this GPU: ``trial_accuracy.py [OUT.json] [--repeat N]
[--patients NAME ...]``

For each patient `plain_step.py` times every variant of the whole model in processes of their own that do not
import fp8doctor, then ``fp8doctor PATIENT --save`` runs with empty compile caches, N times, then
`plain_step.py` again: the mean of both is the truth, and how far they are apart is printed. Prints a Markdown
table; exits with 1 when a prediction misses: time of each variant within 3 % (median of all within 1 %),
memory within 1 %, the trial within its seconds, the speedup of the prescription within 5 %.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PATIENTS = ("decoder_468m", "decoder_454m", "llama_8b_float8")
VARIANTS = ("as_is", "bf16", "bf16_compiled", "prescribed")
TIME, MEDIAN_TIME, MEMORY, SPEEDUP, SECONDS = 0.03, 0.01, 0.01, 0.05, 60.0
"""Bounds of DESIGN, section 7: shares, and seconds of the trial without loading."""


def trial(path: Path, target: Path) -> dict[str, Any]:
    """The report of one ``fp8doctor`` run. Its compile caches are new, as they are on a user's first run."""
    command = [
        sys.executable,
        "-m",
        "fp8doctor",
        str(path),
        "--save",
        str(target),
        "--fail-on",
        "never",
        "-q",
    ]
    with tempfile.TemporaryDirectory() as caches:
        cold = {"TORCHINDUCTOR_CACHE_DIR": f"{caches}/inductor", "TRITON_CACHE_DIR": f"{caches}/triton"}
        subprocess.run(
            command, cwd=ROOT, env=os.environ | {"NO_COLOR": "1"} | cold, check=True, stdout=sys.stderr
        )
    report: dict[str, Any] = json.loads(target.read_text())
    return report


def truth(path: Path, variant: str) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, str(HERE / "plain_step.py"), str(path), variant],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    measured: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return measured


def both(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """The truth from a run before the trials and one after them."""
    times = (before["step_ms"], after["step_ms"])
    mean = statistics.mean(times)
    return {
        "step_ms": mean,
        "apart": (max(times) - min(times)) / mean,
        "peak_gib": max(before["peak_gib"], after["peak_gib"]),
    }


def speedup(steps_ms: Mapping[str, float]) -> float:
    """Best BF16 / the prescription."""
    return min(steps_ms["bf16"], steps_ms["bf16_compiled"]) / steps_ms["prescribed"]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--patients", nargs="*", default=PATIENTS)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--reports", type=Path, help="folder in which the reports are kept")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    missed: list[str] = []
    with tempfile.TemporaryDirectory() as scratch:
        reports = arguments.reports or Path(scratch)
        reports.mkdir(parents=True, exist_ok=True)
        for name in arguments.patients:
            path = ROOT / "tests" / "patients" / f"{name}.py"
            before = {variant: truth(path, variant) for variant in VARIANTS}
            saved = [
                trial(path, reports / f"{name}-{repetition}.json") for repetition in range(arguments.repeat)
            ]
            truths = {variant: both(before[variant], truth(path, variant)) for variant in VARIANTS}
            for variant, known in truths.items():
                print(f"truth {name} {variant} {json.dumps(known)}", flush=True)
            for repetition, report in enumerate(saved):
                found, misses = held(name, repetition, report, truths)
                rows += found
                missed += misses
                if arguments.out:
                    arguments.out.write_text(json.dumps(rows, indent=1))
    errors = [abs(row["time_error"]) for row in rows if row["time_error"] is not None]
    middle = statistics.median(errors) if errors else 0.0
    missed += [f"median time error {100 * middle:.1f} %"] if middle > MEDIAN_TIME else []
    print(
        f"median time error {100 * middle:.2f} %; "
        + (f"missed: {'; '.join(missed)}" if missed else "every bound held")
    )
    return bool(missed)


def held(
    name: str, repetition: int, report: dict[str, Any], truths: dict[str, dict[str, float]]
) -> tuple[list[dict[str, Any]], list[str]]:
    """One row per variant, printed, and what misses its bound."""
    result = report["facts"]["trial"]
    arms = {arm["name"]: arm for arm in result["arms"]}
    rows: list[dict[str, Any]] = []
    missed: list[str] = []
    for variant, known in truths.items():
        arm = arms.get(variant, {"tried": False, "reason": "no such arm"})
        row = {
            "patient": name,
            "repetition": repetition,
            "variant": variant,
            **known,
            "predicted_ms": None,
            "low_ms": None,
            "high_ms": None,
        }
        row |= {"time_error": None, "predicted_gib": None, "memory_error": None, "reason": arm["reason"]}
        row |= {
            "trial_s": result["elapsed_s"],
            "self_check_ratio": result["self_check_ratio"],
            "status": report["verdict"]["status"],
        }
        rows.append(row)
        if not arm["tried"]:
            missed.append(f"{name} {variant}: {arm['reason']}")
            continue
        time, memory = arm["step_ms"] / known["step_ms"] - 1, arm["peak_gib"] / known["peak_gib"] - 1
        row |= {
            "predicted_ms": arm["step_ms"],
            "low_ms": arm["low_ms"],
            "high_ms": arm["high_ms"],
            "time_error": time,
        }
        row |= {"predicted_gib": arm["peak_gib"], "memory_error": memory, "rounds": len(arm["rounds_ms"])}
        times = f"{known['step_ms']:.1f} | {arm['step_ms']:.1f} | {100 * time:+.1f} %"
        memories = f"{known['peak_gib']:.2f} | {arm['peak_gib']:.2f} | {100 * memory:+.2f} %"
        print(f"| {name} | {variant} | {times} | {memories} | {result['elapsed_s']:.0f} |", flush=True)
        missed += [f"{name} {variant}: time {100 * time:+.1f} %"] if abs(time) > TIME else []
        missed += [f"{name} {variant}: memory {100 * memory:+.2f} %"] if abs(memory) > MEMORY else []
    if all(row["predicted_ms"] for row in rows):
        true = speedup({variant: known["step_ms"] for variant, known in truths.items()})
        predicted = speedup({row["variant"]: row["predicted_ms"] for row in rows})
        print(
            f"{name}: speedup of the prescription {true:.3f} in plain scripts, {predicted:.3f} in the trial",
            flush=True,
        )
        off = predicted / true - 1
        missed += [f"{name}: speedup {100 * off:+.1f} %"] if abs(off) > SPEEDUP else []
    missed += [f"{name}: the trial took {result['elapsed_s']:.0f} s"] if result["elapsed_s"] > SECONDS else []
    return rows, missed


if __name__ == "__main__":
    sys.exit(main())
