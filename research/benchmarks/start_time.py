"""CPU of commands that examine nothing: ``python research/benchmarks/start_time.py``, bound 0.15 s of CPU
each (warm file cache), beside the import of click alone.

Exits with 1 when a median is over the bound, or when a command imports torch.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path
from statistics import median

from tabulate import tabulate

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from research.benchmarks.machine import machine

ROOT = Path(__file__).resolve().parents[2]
BOUND_S = 0.15
RUNS = 9
COMMANDS = (("--help",), ("--version",), ("list",), ("explain", "CMP001"), ("explain", "amax"))
ENVIRONMENT = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
"""Bytecode is kept between runs, as pip makes it when it installs."""


def seconds(args: tuple[str, ...]) -> float:
    """CPU time of one run in a process of its own, of the user and the system."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, *args],
        cwd=ROOT,
        check=True,
        stdout=subprocess.DEVNULL,
        env=ENVIRONMENT,
        timeout=3600,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def imports_torch(args: tuple[str, ...]) -> bool:
    """Whether the command has torch among its modules when it ends."""
    code = (
        "import atexit, sys; atexit.register(lambda: 'torch' in sys.modules and print('torch', "
        "file=sys.stderr)); from fp8doctor.cli import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *args],
        cwd=ROOT,
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        timeout=3600,
    )
    return "torch" in done.stderr


def main() -> int:
    """Print the median and the spread of every command; 1 when a bound is missed."""
    rows, missed = [], False
    for args in COMMANDS:
        words = ("-m", "fp8doctor", *args)
        seconds(words)
        times = sorted(seconds(words) for _ in range(RUNS))
        heavy = imports_torch(args)
        missed = missed or heavy or median(times) > BOUND_S
        rows.append(
            (
                f"fp8doctor {' '.join(args)}",
                *(1e3 * each for each in (median(times), times[0], times[-1], BOUND_S)),
                "yes" if heavy else "no",
            )
        )
    click = sorted(seconds(("-c", "import click")) for _ in range(RUNS))
    rows.append(("import click", *(1e3 * each for each in (median(click), click[0], click[-1])), None, "no"))
    print(machine(("click", "msgspec")))
    print(
        tabulate(
            rows,
            ("command", "median ms", "least", "most", "bound ms", "imports torch"),
            floatfmt=".0f",
            tablefmt="github",
        )
    )
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
