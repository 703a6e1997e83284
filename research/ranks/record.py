"""Run the jobs of several GPUs with and without fp8doctor: ``python -m research.ranks.record FOLDER``

Each job of `JOBS` is started with torchrun on two GPUs, as it is and under ``fp8doctor run``. What the ranks
print has to be the same: it ends with a digest of their weights and the sum of the states of their random
numbers. Reports go into FOLDER, as text and as JSON; ``summary.txt`` tells what was the same and found.
The plain ones, and the watched ones whose diagnosis rests on no time, run side by side.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
JOB = Path(__file__).parent / "job.py"

LIMIT_S = 150
"""The longest that one job may take, in seconds."""

JOBS = {
    "ddp_torchao": "--wrap ddp --fp8 torchao --compile blocks",
    "ddp_torchao_eager": "--wrap ddp --fp8 torchao",
    "ddp_torchao_compiled_whole": "--wrap ddp --fp8 torchao --compile model",
    "fsdp2_float8_all_gather": "--wrap fsdp2 --fp8 torchao --all-gather --precompute --compile blocks",
    "fsdp2_without_precompute": "--wrap fsdp2 --fp8 torchao --all-gather --compile blocks",
    "fsdp2_bf16_all_gather": "--wrap fsdp2 --fp8 torchao --compile blocks",
    "fsdp2_few_rows": "--wrap fsdp2 --fp8 torchao --all-gather --precompute --compile blocks --rows 512",
    "fsdp1_torchao": "--wrap fsdp1 --fp8 torchao",
    "ddp_te_delayed": "--wrap ddp --fp8 te",
    "ddp_te_delayed_own_amax": "--wrap ddp --fp8 te --own-amax",
    "ddp_slow_rank": "--wrap ddp --fp8 torchao --compile blocks --slow 0.05",
    "ddp_uneven_steps": "--wrap ddp --fp8 torchao --compile blocks --fewer 8",
    "ddp_rank_raises": "--wrap ddp --fp8 torchao --raises 25",
    "ddp_rank_raises_first": "--wrap ddp --fp8 torchao --raises 0",
    "ddp_rank_killed": "--wrap ddp --fp8 torchao --killed 25",
}
"""Name -> arguments of `research.ranks.job`."""

NOT_TIMED = ("ddp_uneven_steps", "ddp_rank_raises", "ddp_rank_raises_first", "ddp_rank_killed")
SIDE_BY_SIDE = 4

Done = tuple[int, list[str], str, float]
"""Exit code, lines of stdout in order of the ranks, stderr, and seconds."""


def started(before: list[str], arguments: list[str]) -> Done:
    """Run a job on two GPUs."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    began = time.perf_counter()
    try:
        done = subprocess.run(
            [*command, *before, str(JOB), *arguments],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
            check=False,
        )
    except subprocess.TimeoutExpired as late:
        stderr = late.stderr.decode(errors="replace") if isinstance(late.stderr, bytes) else late.stderr or ""
        return -1, [], f"took longer than {LIMIT_S} s\n{stderr}", time.perf_counter() - began
    return done.returncode, sorted(done.stdout.splitlines()), done.stderr, time.perf_counter() - began


def plain(name: str) -> Done:
    return started([], JOBS[name].split())


def watched(name: str, folder: Path) -> Done:
    options = ["-m", "fp8doctor", "run", "--save", str(folder / f"{name}.json")]
    return started(options, JOBS[name].split())


def compared(name: str, folder: Path, plain: Done, watched: Done) -> list[str]:
    """What is to be told of a job that ran both ways."""
    report = folder / f"{name}.json"
    (folder / f"{name}.txt").write_text(watched[2], encoding="utf-8")
    (folder / f"{name}.plain.txt").write_text(f"{plain[1]}\n{plain[2]}", encoding="utf-8")
    same = "the same" if plain[:2] == watched[:2] else "NOT THE SAME"
    lines = [
        f"== {name}: exit {plain[0]} and {watched[0]}, what {len(watched[1])} ranks printed: "
        f"{same}; {plain[3]:.0f} and {watched[3]:.0f} s"
    ]
    if plain[1] != watched[1]:
        lines += [
            *(f"   plain   {line[:400]}" for line in plain[1]),
            *(f"   watched {line[:400]}" for line in watched[1]),
        ]
    if report.exists():
        saved = json.loads(report.read_text(encoding="utf-8"))
        lines += [f"   {each['severity']} {each['code']} {each['title']}" for each in saved["findings"]]
        lines.append(f"   verdict: {saved['verdict']['summary']}")
    said = [
        line for line in watched[2].splitlines() if line.startswith(("fp8doctor:", "rank ", "2 processes"))
    ]
    return [*lines, *(f"   {line}" for line in said)]


def by_name(names: Iterable[str], run: Callable[[str], Done], at_once: int) -> dict[str, Done]:
    names = list(names)
    with ThreadPoolExecutor(at_once) as pool:
        return dict(zip(names, pool.map(run, names), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="*", default=list(JOBS), choices=list(JOBS))
    wanted = parser.parse_args()
    wanted.folder.mkdir(parents=True, exist_ok=True)
    as_they_are = by_name(wanted.only, plain, SIDE_BY_SIDE)
    with (wanted.folder / "summary.txt").open("a", encoding="utf-8") as summary:
        timed = [[name] for name in wanted.only if name not in NOT_TIMED]
        for group in [*timed, [name for name in wanted.only if name in NOT_TIMED]]:
            under = by_name(group, lambda name: watched(name, wanted.folder), SIDE_BY_SIDE)
            for name in group:
                for line in compared(name, wanted.folder, as_they_are[name], under[name]):
                    print(line, flush=True)
                    print(line, file=summary, flush=True)


if __name__ == "__main__":
    main()
