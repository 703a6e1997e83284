"""The tables of `run_lockstep.py`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tabulate import tabulate

Array = npt.NDArray[np.float64]

BOOTSTRAPS = 2000

TURN = 8
"""Steps of a turn. The first is left out: the process has just waited."""

ROUNDS = 12
"""Rounds before fp8doctor's window, and of it."""

WARMUP, STEPS = 1 + ROUNDS * TURN, ROUNDS * TURN
PHASES = {
    "before": slice(0, ROUNDS),
    "watched": slice(ROUNDS, 2 * ROUNDS),
    "after": slice(2 * ROUNDS + 2, None),
}
"""Rounds after the first step. Two between the phases have the steps in which fp8doctor profiles."""


def read(out: Path) -> list[dict[str, Any]]:
    """Read the recorded jobs, each with its steps by round and process."""
    jobs: list[dict[str, Any]] = []
    for line in map(json.loads, out.read_text().splitlines()):
        if "job" in line:
            jobs.append({"steps": [], "watched": [], **line})
        elif "steps" in line:
            jobs[-1]["steps"].append(line["steps"])
        else:
            jobs[-1].update(line)
    return [job for job in jobs if len(job["steps"]) > PHASES["after"].start + 5]


def compared(ms: Array, these: list[int], those: list[int]) -> str:
    """Compare processes with others: median over the rounds of the ratio of their steps, with 95 % intervals
    over the rounds and over the processes, and the ratio of the whole times."""
    logs = np.log(ms) - np.log(ms).mean(axis=1, keepdims=True)
    rounds = logs[:, these].mean(axis=1) - logs[:, those].mean(axis=1)
    drawn = np.random.default_rng(0).integers(0, len(rounds), (BOOTSTRAPS, len(rounds)))
    low, high = np.percentile(np.median(rounds[drawn], axis=1), [2.5, 97.5])
    middles = [np.median(logs[:, each], axis=0) for each in (these, those)]
    error = math.sqrt(sum(np.var(each, ddof=1) / len(each) for each in middles))
    free = len(these) + len(those) - 2
    half = error * (1.96 + 2.37 / free + 2.82 / free**2 + 2.56 / free**3)  # Student's t
    whole = ms[:, these].mean() / ms[:, those].mean()
    return (
        f"{percent(np.median(rounds))} [{percent(low)}, {percent(high)}] ± {100 * half:.2f}, "
        f"whole {percent(math.log(whole))}"
    )


def percent(log_ratio: Any) -> str:
    return f"{100 * math.expm1(log_ratio):+.2f}"


def tables(out: Path) -> str:
    """Format the recorded jobs."""
    rows, losses, jobs = [], [], read(out)
    for job in jobs:
        both = np.array(job["steps"][1:])  # by round, process, step: ms, loss
        run, plain = ([n for n, kind in enumerate(job["kinds"]) if kind == of] for of in ("run", "plain"))
        for phase, rounds in PHASES.items():
            ms = both[rounds, :, 1:, 0].mean(axis=2)
            row = [job["job"], phase, len(ms), f"{np.median(ms[:, plain]):.2f}", compared(ms, run, plain)]
            rows.append([*row, compared(ms, plain[::2], plain[1::2])])
        examined = both[2 * ROUNDS - 1 : 2 * ROUNDS + 2, :, :, 0].sum(axis=(0, 2)) / 1e3
        once = examined[run].mean() - examined[plain].mean()
        loss = both[:, :, :, 1].transpose(0, 2, 1).reshape(-1, len(job["kinds"]))
        apart = [
            np.abs(loss[:, these, None] - loss[:, None, those]).mean(axis=0)
            for these, those in ((run, plain), (plain, plain))
        ]
        control = apart[1][~np.eye(len(plain), dtype=bool)]
        watched = sum(job["watched"])
        row = [job["job"], f"{watched} of {len(run)}", f"{once:.2f}", f"{np.ptp(loss[0]):.1e}"]
        losses.append([*row, *(f"{each.mean():.2e} (to {each.max():.2e})" for each in (apart[0], control))])
    heads = ["job", "phase", "rounds", "plain ms", "run vs plain, %", "plain vs plain, %"]
    more = ["job", "watched", "once, s", "first loss apart", "run vs plain", "plain vs plain"]
    texts = (
        tabulate(each, headers=names, tablefmt="github", disable_numparse=True)
        for each, names in ((rows, heads), (losses, more))
    )
    return "\n\n".join((*(f"{job['job']}: {job['on']}" for job in jobs), *texts))
