"""Hold the trial's predictions to plain scripts, on jobs that nothing else here uses: ``trial_jobs.py OUT
[NAME ...] [--gpus N] [--te FOLDER] [--budget S] [--until S] [--warm] [--tiny]``

Each job of `jobs/` is examined by ``fp8doctor JOB --save`` with empty compile caches, with ``--warm`` once
more with the caches kept; then `plain_step.py` times its variants in processes of their own that do not
import fp8doctor. They compile side by side as far as the GPU holds them, and are timed one after the other.
With ``--gpus N`` so many jobs run side by side, each on a GPU and a share of the cores of
its own. OUT/table.md is written anew after every run, and OUT/JOB holds the reports and the plain times; a
run into the same OUT leaves other jobs there as they are. ``--until S`` begins no job and no plain
script after S seconds, and the table names the jobs that were left. Exits with 1 when a bound of
`held_to_plain.py` is missed. ``--tiny`` tries the tool on a CPU, whose times are held to nothing: it exits
with 1 when a job has no trial or a plain script fails. The GPUs are those that CUDA_VISIBLE_DEVICES names,
where it is set.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import math
import os
import queue
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import held_to_plain
import plan_table
from job_process import ROOT, Run, end

HERE = Path(__file__).resolve().parent
JOBS = HERE / "jobs"
SHARED = "plain"
"""What the jobs import, and no job."""

LOADING_S, PLAIN_S, COMPILING_PLAIN_S = 120.0, 150.0, 480.0
"""Seconds after which a run is ended: of a trial beside twice its budget, and of a plain script; the last is
for jobs with a ``COLD_S`` of their own, which compile for long. The graph of 28 FP8 blocks took more than 120
s (H200, torch 2.11)."""

LONGEST_DEFAULT_S = 120.0
"""Budget in seconds of a trial that is given none, at the most."""

LONGEST_S = 4 * 3600.0
"""Seconds after which all is ended."""

ON_CPU = 5
"""So many times as long with ``--tiny``."""

AT_ONCE = 6
"""Plain scripts that import what they need side by side, before it is known how many there are; so many
variants a job has. Not beside the trial, whose host it is."""

ROOM, CONTEXT_GIB = 0.9, 1.5
"""Share of the GPU's memory that plain scripts may fill together; what a process takes beside its tensors:
CUDA's context, cuBLAS's workspaces, and what the allocator cannot use."""


class Interrupted(Exception):
    """The run ends before all of it was done: what was under way has no result."""


@dataclass
class Bench:
    """What all jobs of this run share."""

    out: Path
    settings: Mapping[str, Mapping[str, Any]]
    arguments: argparse.Namespace
    lock: threading.Lock
    runs: list[Run] = field(default_factory=list)
    """All that were started."""
    interrupted: threading.Event = field(default_factory=threading.Event)
    began: float = field(default_factory=time.monotonic)
    not_begun: list[str] = field(default_factory=list)
    """Jobs that ``--until`` left out."""

    def end(self) -> None:
        """End all that still runs. No lane begins anything after it."""
        self.interrupted.set()
        for run in self.runs:
            if run.process.poll() is None:
                end(run.process)

    def late(self) -> bool:
        """Whether nothing is to begin any more."""
        until = self.arguments.until
        return until is not None and time.monotonic() - self.began > until

    def write_table(self) -> list[str]:
        """Write the table of all that is known so far."""
        with self.lock:
            left = [*self.not_begun]
            known = {name: own for name, own in self.settings.items() if name not in left}
            text, missed = held_to_plain.table(self.out, known)
            if left:
                text += f"\nNot begun within {self.arguments.until:g} s: {', '.join(left)}.\n"
            (self.out / "table.md").write_text(text)
        return missed


def settings_of(path: Path) -> dict[str, Any]:
    """Read the constants of a job's file without running it."""
    found: dict[str, Any] = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            try:
                found[node.targets[0].id] = ast.literal_eval(node.value)
            except ValueError:
                continue
    return found


class JobRun:
    """One job on one GPU."""

    def __init__(self, bench: Bench, name: str, gpu: str, caches: Path) -> None:
        self.bench, self.name = bench, name
        self.folder, self.path = bench.out / name, JOBS / f"{name}.py"
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        te, needs = bench.arguments.te, bench.settings[name].get("NEEDS", ())
        found = [str(ROOT), *([te] if te and "transformer_engine" in needs else [])]
        self.environment = {
            "CUDA_VISIBLE_DEVICES": gpu,
            "NO_COLOR": "1",
            "PYTHONPATH": os.pathsep.join([*found, *filter(None, [os.environ.get("PYTHONPATH")])]),
            "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
            "TRITON_CACHE_DIR": str(caches / "triton"),
            **({"TRIAL_JOBS_TINY": "1", "CUDA_VISIBLE_DEVICES": ""} if bench.arguments.tiny else {}),
        }
        given = ("transformer_engine",) if te else ()
        self.missing = [each for each in needs if each not in given and not importlib.util.find_spec(each)]
        self.runs: dict[str, Any] = {}

    def all(self) -> None:
        """Examine the job and time its plain scripts; what fails costs only itself."""
        if self.missing:
            self.note("skipped", f"{', '.join(self.missing)} is not installed")
            return
        try:
            for kind in ("cold", "warm") if self.bench.arguments.warm else ("cold",):
                self.examine(kind)
            self.time_plainly([self.plain() for _ in range(AT_ONCE)])
        finally:  # what is left waits with its memory on the GPU of the next job
            for each in self.bench.runs:
                if each.log.parent == self.folder:
                    end(each.process)

    def note(self, what: str, value: Any) -> None:
        """Keep what became of a run, and write the table anew."""
        self.runs[what] = value
        (self.folder / "runs.json").write_text(json.dumps(self.runs, indent=1))
        self.bench.write_table()

    def examine(self, kind: str) -> None:
        """Run fp8doctor on the job's file, and keep its report."""
        command = [sys.executable, "-m", "fp8doctor", str(self.path), "--fail-on", "never", "-q"]
        budget = self.bench.arguments.budget
        command += ["--budget", f"{budget:g}"] if budget else []
        command += ["--save", str(self.folder / f"{kind}.json"), "-o", str(self.folder / f"{kind}.txt")]
        command += ["--device", "cpu"] if self.bench.arguments.tiny else []
        began = time.monotonic()
        run = self.started(command, f"{kind}.log")
        error = self.waited(run, limit_s=2 * (budget or LONGEST_DEFAULT_S) + LOADING_S)
        self.note(kind, {"seconds": time.monotonic() - began, "error": error})
        print(f"{self.name}: {kind} {error or f'{time.monotonic() - began:.0f} s'}", flush=True)

    def time_plainly(self, idle: list[Run]) -> None:
        """Time every variant that is wanted and that the job can be changed to by hand, each set of changes
        once.

        The first tell the sign: the step as it is and BF16. What found no memory beside others runs again
        alone.
        """
        variants = held_to_plain.wanted(
            self.report(), self.by_hand(idle[0]), self.report_path(), self.bench.settings[self.name]
        )
        known: dict[tuple[str, ...], Any] = {tuple(of): {"changes": of} for of in variants.values()}
        self.note_plain({name: known[tuple(of)] for name, of in variants.items()})
        groups = side_by_side(self.peaks_gib(variants), self.gpu_gib())
        while groups and not self.bench.late():
            group = groups.pop(0)
            runs = {changes: idle.pop() if idle else self.plain() for changes in group}
            for changes, run in runs.items():
                run.tell(json.dumps(changes))
            until = time.monotonic() + self.plain_s  # one that compiles for longer keeps no other waiting
            errors = {
                changes: self.waited(run, lines=2, limit_s=max(1.0, until - time.monotonic()))
                for changes, run in runs.items()
            }
            for changes, run in runs.items():
                error = errors[changes]
                if not error:
                    run.tell("")
                    error = self.waited(run)
                if error and "out of memory" in error and len(group) > 1:
                    groups.append([changes])
                known[changes].pop("error", None)
                known[changes] |= {"error": error} if error else json.loads(run.lines()[-1])
                self.note_plain({name: known[tuple(of)] for name, of in variants.items()})
                print(f"{self.name}: {changes} {known[changes]}", flush=True)

    def peaks_gib(self, variants: Mapping[str, Sequence[str]]) -> dict[tuple[str, ...], float | None]:
        """Take from the report what each set of changes needs; of a rival the most that another needs. None
        where it does not tell."""
        arms = held_to_plain.every_arm(self.report() or {"facts": {}})
        if (path := self.report_path()) and (end := plan_table.end_of(path)):
            arms[plan_table.PLAN] = {"peak_gib": end.get("peak_gib")}
        peaks = {name: arms.get(name, {}).get("peak_gib") for name in variants}
        most = max((peak for peak in peaks.values() if peak), default=None)
        return {
            tuple(of): most if name.startswith(plan_table.RIVAL) else peaks[name]
            for name, of in variants.items()
        }

    def gpu_gib(self) -> float:
        """Return the memory of the GPU that the report names; 0 where it names none."""
        gpus = (self.report() or {"facts": {"gpus": []}})["facts"]["gpus"]
        return next((gpu.get("memory_gib") or 0.0 for gpu in gpus if gpu.get("visible")), 0.0)

    def note_plain(self, times: Mapping[str, Any]) -> None:
        """Keep the plain scripts by their arms, with those that are still to run, and write the table
        anew."""
        (self.folder / "plain.json").write_text(json.dumps(times, indent=1))
        self.bench.write_table()

    @property
    def plain_s(self) -> float:
        """Return the limit of a plain script of this job."""
        return COMPILING_PLAIN_S if "COLD_S" in self.bench.settings[self.name] else PLAIN_S

    def plain(self) -> Run:
        """Start a plain script, which imports the job and waits."""
        number = sum(run.log.parent == self.folder for run in self.bench.runs)
        return self.started(
            [sys.executable, str(HERE / "plain_step.py"), str(self.path)], f"plain-{number}.log"
        )

    def started(self, command: Sequence[str], log: str) -> Run:
        if self.bench.interrupted.is_set():
            raise Interrupted
        run = Run.started(command, self.environment, self.folder / log)
        self.bench.runs.append(run)
        if self.bench.interrupted.is_set():  # meanwhile: whoever set it may not have seen this one
            end(run.process)
            raise Interrupted
        return run

    def waited(self, run: Run, *, lines: int | None = None, limit_s: float = 0.0) -> str | None:
        """Wait for so many lines of a process, or for its end; return why they do not come, or None."""
        limit_s = (limit_s or self.plain_s) * (ON_CPU if self.bench.arguments.tiny else 1)
        error = run.ended(limit_s) if lines is None else run.has_said(lines, limit_s)
        if error and self.bench.interrupted.is_set():
            raise Interrupted
        return error

    def report(self) -> Any:
        """The report whose arms the plain scripts repeat."""
        path = self.report_path()
        return held_to_plain.read(path) if path else None

    def report_path(self) -> Path | None:
        """Where it is; None if there is none."""
        paths = (self.folder / "cold.json", self.folder / "warm.json")
        return next((path for path in paths if held_to_plain.read(path)), None)

    def by_hand(self, idle: Run) -> list[str]:
        """Return which changes the job's file says that it can be made to."""
        names: list[str] = [] if self.waited(idle, lines=1) else json.loads(idle.lines()[0])
        return names


def side_by_side(
    peaks_gib: Mapping[tuple[str, ...], float | None], gpu_gib: float
) -> list[list[tuple[str, ...]]]:
    """Group plain scripts, in their order, by what the GPU holds together; one of unknown size is alone."""
    groups: list[list[tuple[str, ...]]] = []
    left = 0.0
    for changes, peak in peaks_gib.items():
        needs = math.inf if peak is None else peak + CONTEXT_GIB
        if not groups or needs > left:
            groups.append([])
            left = ROOM * gpu_gib
        groups[-1].append(changes)
        left -= needs
    return groups


def visible(count: int) -> list[str]:
    """Name the first GPUs that this process may use."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    return given.split(",")[:count] if given else [str(number) for number in range(count)]


def shares(cores: Iterable[int], count: int) -> list[set[int]]:
    """Split the cores evenly, so that jobs side by side have cores of their own; all have all where there are
    fewer."""
    every = sorted(cores)
    each = len(every) // count
    return [
        set(every[each * number : each * (number + 1)]) if each else set(every) for number in range(count)
    ]


def worker(bench: Bench, names: queue.SimpleQueue[str], gpu: str, cores: set[int]) -> None:
    """Take job after job for one GPU, on these cores."""
    os.sched_setaffinity(threading.get_native_id(), cores)  # what this thread starts inherits them
    while True:
        try:
            name = names.get_nowait()
        except queue.Empty:
            return
        if bench.late():
            bench.not_begun.append(name)
            print(f"{name}: not begun", flush=True)
            continue
        try:
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as caches:
                JobRun(bench, name, gpu, Path(caches)).all()
        except Interrupted:
            return
        except (OSError, ValueError, KeyError) as error:
            print(f"{name}: {type(error).__name__}: {error}", flush=True)


def main() -> int:
    """Run the jobs and print the table."""
    known = sorted(path.stem for path in JOBS.glob("*.py") if path.stem != SHARED)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(known)}")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--te", help="folder that holds Transformer Engine")
    parser.add_argument("--budget", type=float, help="seconds; fp8doctor's own without it")
    parser.add_argument("--until", type=float, help="seconds after which nothing is begun")
    parser.add_argument("--warm", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(known):
        parser.error(f"no such job: {', '.join(sorted(unknown))}")
    bench = Bench(
        arguments.out.resolve(),
        {name: settings_of(JOBS / f"{name}.py") for name in known},
        arguments,
        threading.Lock(),
    )
    names: queue.SimpleQueue[str] = queue.SimpleQueue()
    for name in arguments.names or sorted(known, key=lambda name: -bench.settings[name].get("COLD_S", 0)):
        names.put(name)
    bench.out.mkdir(parents=True, exist_ok=True)
    gpus = visible(arguments.gpus)
    workers = [
        threading.Thread(target=worker, args=(bench, names, gpu, cores), daemon=True)
        for gpu, cores in zip(gpus, shares(os.sched_getaffinity(0), len(gpus)), strict=True)
    ]
    try:
        for each in workers:
            each.start()
        for each in workers:
            each.join(timeout=LONGEST_S)
    finally:
        bench.end()
    missed = bench.write_table()
    print((bench.out / "table.md").read_text())
    return int(failed(bench) if arguments.tiny else bool(missed))


def failed(bench: Bench) -> bool:
    """Whether a job that was not skipped has no trial, or a plain script failed."""
    folders = [bench.out / name for name in bench.settings if (bench.out / name / "runs.json").exists()]
    tried = [each for each in folders if "skipped" not in (held_to_plain.read(each / "runs.json") or {})]
    plain = [each for folder in tried for each in (held_to_plain.read(folder / "plain.json") or {}).values()]
    reports = [held_to_plain.read(folder / "cold.json") for folder in tried]
    return any("error" in each for each in plain) or any(
        not each or not held_to_plain.arms_of(each) for each in reports
    )


if __name__ == "__main__":
    sys.exit(main())
