"""What ``fp8doctor run`` and ``traceml run`` cost the steps of a whole job: ``run_beside.py [--traceml
FOLDER] [--rounds N] [--steps N] [--sizes small|large]``

The job is `self_timed.py`, a Trainer, which TraceML instruments by itself. Each round runs it under
Python, under ``fp8doctor run`` and, where FOLDER holds traceml-ai, under ``traceml run``, each
first in turn. Steps before the end of fp8doctor's window are left out. Of every round the median
step is divided by that of the same round under Python, TraceML's by that of TraceML disabled.
Prints Markdown; exits with 1 when fp8doctor's median of the rounds is above 1 %. A machine that
others use measures the others.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path

from tabulate import tabulate

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.benchmarks.machine import machine

ROOT = Path(__file__).resolve().parents[2]
JOB = ROOT / "tests" / "benchmarks" / "self_timed.py"

BOUND_PCT = 1.0

LEFT_OUT = 100
"""Steps before the stretch that is compared: the window ends long before."""

SIZES = {
    "small": "--hidden 128 --layers 4 --batch 2 --length 64",
    "large": "--hidden 2048 --layers 8 --batch 4 --length 2048",
}

COMPARED_WITH = {
    "python": "python",
    "fp8doctor run": "python",
    "traceml run --disable-traceml": "python",
    "traceml run": "traceml run --disable-traceml",
}
"""TraceML starts a job by torchrun, with a process group; disabled it does that alone."""

TRACEML = "import sys; from traceml_ai.launcher.cli import main; sys.exit(main())"


def started(under: str, out: Path, arguments: list[str], traceml: Path | None) -> float:
    """Run the job; its seconds as a whole."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), paths(traceml))))}
    job = [str(JOB), str(out), *arguments]
    if under.startswith("traceml"):
        options = ["--mode", "summary", "--logs-dir", str(out.with_suffix("")), "--run-name", "run"]
        options += ["--no-save-training-output", *under.split()[2:]]
        words = ["-c", TRACEML, "run", *options, job[0], "--args", *job[1:]]
    else:
        words = ["-m", "fp8doctor", "run", "-q", *job] if under == "fp8doctor run" else job
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, *words],
        env=environment,
        cwd=out.parent,
        capture_output=True,
        text=True,
        timeout=3600,
    )
    if done.returncode or not out.exists():
        sys.exit(f"{under}: exit code {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    if under == "traceml run" and " 0 common steps" in done.stdout:
        sys.exit(f"TraceML saw no step:\n{done.stdout[-3000:]}")
    return time.monotonic() - began


def paths(traceml: Path | None) -> str:
    return os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(traceml) if traceml else None)))


def step_ms(out: Path, clock: str) -> float:
    stamps = json.loads(out.read_text())[f"{clock}_s"][LEFT_OUT:]
    return statistics.median(b - a for a, b in itertools.pairwise(stamps)) * 1e3


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--traceml", type=Path, help="folder that traceml-ai is installed into")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--sizes", choices=SIZES, default="small")
    arguments = parser.parse_args()
    kinds = list(COMPARED_WITH) if arguments.traceml else ["python", "fp8doctor run"]
    took: dict[str, dict[str, list[float]]] = {kind: {"wall": [], "cpu": [], "whole": []} for kind in kinds}
    words = [*SIZES[arguments.sizes].split(), "--steps", str(arguments.steps)]
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(arguments.rounds):
            for kind in kinds[turn % len(kinds) :] + kinds[: turn % len(kinds)]:
                out = Path(folder, f"{kind.replace(' ', '_')}_{turn}.json")
                took[kind]["whole"].append(started(kind, out, words, arguments.traceml))
                for clock in ("wall", "cpu"):
                    took[kind][clock].append(step_ms(out, clock))
    rows, worst = [], 0.0
    for kind in kinds:
        row: dict[str, object] = {"under": kind, "beside": COMPARED_WITH[kind]}
        for clock, name in (("wall", "step ms"), ("cpu", "processor ms")):
            more = [
                100 * (a / b - 1)
                for a, b in zip(took[kind][clock], took[COMPARED_WITH[kind]][clock], strict=True)
            ]
            row[name] = round(statistics.median(took[kind][clock]), 3)
            row[f"{name}, more %"] = (
                f"{statistics.median(more):+.2f} ({min(more):+.2f} to {max(more):+.2f})"
                if kind != "python"
                else ""
            )
            if kind == "fp8doctor run" and clock == "wall":
                worst = statistics.median(more)
        row["whole job s"] = round(statistics.median(took[kind]["whole"]), 1)
        rows.append(row)
    print(f"{gpu()} · {machine(['torch', 'transformers'])} · {traceml_version(arguments.traceml)}\n")
    print(
        f"{arguments.sizes}: {' '.join(words)}; {arguments.rounds} rounds, steps after the first {LEFT_OUT}\n"
    )
    print(tabulate(rows, headers="keys", tablefmt="github"))
    return int(worst > BOUND_PCT)


def gpu() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"


def traceml_version(folder: Path | None) -> str:
    found = (each.version for each in metadata.distributions(path=[str(folder)]) if each.name == "traceml-ai")
    return f"traceml-ai {next(found, '?')}" if folder else "no TraceML"


if __name__ == "__main__":
    sys.exit(main())
