"""How long the commands take that examine nothing: ``python tests/benchmarks/start_time.py``, bound 0.15 s each (warm file cache)."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[2]
BOUND_S = 0.15
RUNS = 9
COMMANDS = (("--help",), ("--version",), ("list",), ("explain", "CMP001"))


def seconds(args: tuple[str, ...]) -> float:
    """Wall time of one run in a process of its own."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-m", "fp8doctor", *args], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def main() -> int:
    """Print the median and the spread of every command; 1 when one is over the bound."""
    late = False
    for args in COMMANDS:
        seconds(args)
        times = sorted(seconds(args) for _ in range(RUNS))
        late = late or median(times) > BOUND_S
        print(f"fp8doctor {' '.join(args):<16} {median(times):.3f} s   ({times[0]:.3f} to {times[-1]:.3f}, {RUNS} runs, bound {BOUND_S} s)")
    return int(late)


if __name__ == "__main__":
    sys.exit(main())
