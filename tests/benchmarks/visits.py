"""Measure how long a visit of an arm has to be: ``visits.py JOB [VARIANT ...] [--steps N] [--rounds N]
[--tiny]``

The trial lets its arms take turns, each visit a few steps of which the first ones are dropped
(`fp8doctor.trial.measure.timer`). A job of `jobs/` is built once for every variant (as it is, and BF16
compiled by block, without a choice) in one process. Each runs alone for some seconds, as a training runs;
then they take turns. For every place in a visit the table says how far the median step is from that of the
run alone: what the clocks at a power limit, the caches, and a host that has not run ahead yet do to the first
steps. ``--tiny`` tries the script on a CPU, whose times mean nothing.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from tabulate import tabulate

from tests.benchmarks import plain_step
from tests.benchmarks.machine import machine

JOBS = Path(__file__).parent / "jobs"
VARIANTS = ("as_is", "bf16_compiled")
ALONE_S = 4.0
"""Seconds that each variant runs alone, before and after the turns; the first half of it is not counted."""

Step = Callable[[], object]


def each_ms(step: Step, count: int) -> list[float]:
    """Time steps in a row, in ms, with nothing between them."""
    if not torch.cuda.is_available():
        times = []
        for _ in range(count):
            began = time.perf_counter()
            step()
            times.append(1e3 * (time.perf_counter() - began))
        return times
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    for mark in marks[:-1]:
        mark.record()
        step()
    marks[-1].record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) for begin, end in itertools.pairwise(marks)]


def alone_ms(step: Step, seconds: float) -> float:
    """Run a step alone for so long, and return the median of the second half."""
    once = statistics.median(each_ms(step, 3))
    times = each_ms(step, max(4, round(1e3 * seconds / once)))
    return statistics.median(times[len(times) // 2 :])


def in_turns(steps: Mapping[str, Step], count: int, rounds: int) -> dict[str, list[list[float]]]:
    """Let the steps take turns, in a new order each round, and return every visit of each."""
    visits: dict[str, list[list[float]]] = {name: [] for name in steps}
    order, shuffle = list(steps), random.Random(0).shuffle
    for _ in range(rounds):
        shuffle(order)
        for name in order:
            visits[name].append(each_ms(steps[name], count))
    return visits


def table(alone: Mapping[str, float], visits: Mapping[str, Sequence[Sequence[float]]]) -> str:
    """Write how far each place in a visit is from the run alone."""
    rows = []
    for name, ms in alone.items():
        places = [statistics.median(place) for place in zip(*visits[name], strict=True)]
        errors = {
            f"step {number}": f"{100 * (each / ms - 1):+.1f} %" for number, each in enumerate(places, 1)
        }
        rows.append({"variant": name, "alone": f"{ms:.2f} ms", **errors})
    return tabulate(rows, headers="keys", tablefmt="github", disable_numparse=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("job", help="the name of a file in jobs/")
    parser.add_argument("variants", nargs="*", default=VARIANTS, metavar="VARIANT")
    parser.add_argument("--steps", type=int, default=10, help="steps of a visit")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args(arguments)
    if given.tiny:
        os.environ["TRIAL_JOBS_TINY"] = "1"
    job = plain_step.loaded((JOBS / f"{given.job}.py").resolve())
    steps: dict[str, Step] = {}
    for name in given.variants:
        torch.manual_seed(0)
        steps[name] = plain_step.training_step(job, [name])
        plain_step.compiled(steps[name])
    seconds = 0.0 if given.tiny else ALONE_S
    before = {name: alone_ms(step, seconds) for name, step in steps.items()}
    visits = in_turns(steps, given.steps, given.rounds)
    after = {name: alone_ms(step, seconds) for name, step in steps.items()}
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    print(f"{given.job} on {gpu} · {machine(('torch', 'torchao'))}")
    print(f"{given.rounds} rounds of {given.steps} steps; alone before and after the turns:", before, after)
    print(table({name: (before[name] + after[name]) / 2 for name in steps}, visits))
    return 0


if __name__ == "__main__":
    sys.exit(main())
