"""Measure how much slower a job's steps are under ``fp8doctor run`` than under Python.

``run_lockstep.py OUT.jsonl [--jobs nanogpt trainer ...] [--each 4] [--seconds 50]`` starts a job
(`lockstep_job.py`) several times under each, all at once on one GPU. In every round each process makes eight
steps, one process at a time, in random order. So all of them meet the same pace of host and GPU.
``run_lockstep.py OUT.jsonl --read`` prints the tables of a recorded file again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import selectors
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.benchmarks.lockstep_tables import STEPS, TURN, WARMUP, tables
from tests.benchmarks.machine import machine

ROOT = Path(__file__).resolve().parents[2]
JOB = ROOT / "tests" / "benchmarks" / "lockstep_job.py"
KINDS = ("plain", "run")

SILENT_S = 300.0
"""The longest that a process may take for a turn: its first step may compile."""

WATCHED_TO_THE_END = "the steps are watched"
"""Begins what fp8doctor prints when it has profiled its last step."""


class Process:
    """One process of the job."""

    def __init__(self, kind: str, words: list[str], log: Path) -> None:
        self.kind, self.log = kind, log
        under = ["-m", "fp8doctor", "run", f"--warmup={WARMUP}", f"--steps={STEPS}"] if kind == "run" else []
        paths = filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))
        self.process = subprocess.Popen(
            [sys.executable, *under, str(JOB), *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("w"),
            bufsize=0,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TORCHINDUCTOR_COMPILE_THREADS": "4"},
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.turn, self.answer = self.process.stdin, self.process.stdout
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.answer, selectors.EVENT_READ)

    def start(self, steps: int) -> None:
        self.turn.write(f"{steps}\n".encode())

    def end_turn(self) -> list[list[float]]:
        """Wait for the end of a turn, and return the ms and loss of each step."""
        line = self.answer.readline() if self.selector.select(SILENT_S) else b""
        if not line:
            raise RuntimeError(f"{self.kind} made no step: {self.log.read_text()[-2000:]}")
        steps: list[list[float]] = json.loads(line)
        return steps

    def end(self, within_s: float) -> None:
        try:
            self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            self.process.kill()


def measure(job: str, each: int, seconds: float, out: Path) -> None:
    """Run a job's processes in rounds, and write a line for every round."""
    name, _, compiled = job.partition("-")
    words = [name, *(["--compiled"] if compiled else [])]
    logs = [out.with_name(f"{out.stem}-{job}-{number}.log") for number in range(len(KINDS) * each)]
    processes = [Process(KINDS[n % len(KINDS)], words, log) for n, log in enumerate(logs)]
    try:
        with out.open("a") as file:
            write(file, job=job, kinds=[each.kind for each in processes], on=on())
            processes[0].start(1)  # alone, to fill the compiler's caches for the others
            first = [processes[0].end_turn()]
            for process in processes[1:]:
                process.start(1)
            write(file, steps=first + [process.end_turn() for process in processes[1:]])
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                steps = {}
                for process in random.sample(processes, len(processes)):
                    process.start(TURN)
                    steps[process] = process.end_turn()
                write(file, steps=[steps[process] for process in processes])
            write(file, watched=[WATCHED_TO_THE_END in each.log.read_text() for each in processes])
    finally:
        for process in processes:
            process.turn.close()  # which ends a process that waits for it
        for process in processes:
            process.end(within_s=2)


def on() -> str:
    """Name what the job runs on."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return f"{time.strftime('%F %T')} · {gpu} · {machine(['torch', 'transformers', 'torchao'])}"


def write(file: Any, **line: Any) -> None:
    file.write(json.dumps(line) + "\n")
    file.flush()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "--jobs", nargs="+", default=["nanogpt", "trainer", "nanogpt-compiled", "trainer-compiled"]
    )
    parser.add_argument("--each", type=int, default=4, help="processes under Python, and under run")
    parser.add_argument("--seconds", type=float, default=50.0, help="of the rounds of a job")
    parser.add_argument("--tiny", action="store_true", help="try the tool on a CPU")
    parser.add_argument("--read", action="store_true")
    arguments = parser.parse_args()
    if arguments.each < 4:
        parser.error("an interval over the processes takes 4 of each")
    os.environ["TRIAL_JOBS_TINY"] = str(int(arguments.tiny))
    for job in [] if arguments.read else arguments.jobs:
        try:
            measure(job, arguments.each, arguments.seconds, arguments.out)
        except (RuntimeError, OSError) as error:
            print(f"{job} failed: {error}", file=sys.stderr)
    print(tables(arguments.out))


if __name__ == "__main__":
    main()
