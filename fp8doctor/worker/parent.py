"""The parent of the child process: keeps the report whatever user code does there.

The caller imports neither torch nor user code. The child sends one JSON message per line over its own pipe,
never over stdout. Output of user code goes to the caller's stderr; the caller can have the child's stderr
held back. The child leads a process group that ends with it.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

import fp8doctor
from fp8doctor.errors import UserError, require_torch
from fp8doctor.facts import Facts, Target, recorded
from fp8doctor.facts.arm_names import Reason
from fp8doctor.facts.no_number import NoNumber, without
from fp8doctor.facts.record import NOT_RECORDED, decoder
from fp8doctor.files import remove_folders_of
from fp8doctor.loading.config_model import is_config, read_config
from fp8doctor.loading.target import locate, refuse_script
from fp8doctor.pipes import lines_of, pipe
from fp8doctor.signals import signals_deferred
from fp8doctor.stages import Doing
from fp8doctor.wording import escaped
from fp8doctor.worker import Message, TrialRequest

TICK_S = 0.05
"""Seconds between looks at the deadline and the child's end while nothing is sent."""

GRACE_S = 2.0
"""Seconds for the child's exit handlers after its last message."""

_BOOT = """\
import importlib.util, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
spec = importlib.util.spec_from_file_location("fp8doctor", sys.argv[1])
sys.modules["fp8doctor"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["fp8doctor"])
from fp8doctor.worker.child import serve
serve(sys.argv[2])
"""
"""Code of the child, run with ``-P``: this same fp8doctor, without changes to ``sys.path``. SIGINT ends it
like any signal: a terminal's keys reach only its parent."""


@dataclass(frozen=True)
class Examination:
    """Result of a worker."""

    facts: Facts
    problem: str | None
    """The reason if the facts are incomplete, in a sentence."""


def examine_in_worker(
    target: str | None,
    *,
    layers: int | None = None,
    batch: int | None = None,
    seq: int | None = None,
    load_timeout: float = 600,
    trial: TrialRequest | None = None,
    planned: bool = False,
    progress: Callable[[Doing], None],
    printed: Printed | None = None,
) -> Examination:
    """Examine ``target`` in a child process, and time it if there is a request. None: environment only.

    Raises `UserError` for the user's mistakes. If a child dies, hangs or sends nonsense, the facts so far
    come back with the problem. If it dies in a variant of the trial, another starts without that variant;
    times that are already known are kept. The trial's budget begins here, holds for all children, and a child
    that exceeds it is killed. If it is ``planned``, a configuration is a target too, and the model is built
    on the meta device. ``printed`` holds back its stderr.
    """
    seen, config = Target(kind="environment", name="environment", attribute=None), None
    if target is not None:
        if planned and is_config(target):
            config = read_config(target)
        else:
            source = locate(target)
            refuse_script(source)
            seen = source.target()
        require_torch(f"examining {escaped(target)}", *(("transformers",) if config else ()))
    request: dict[str, Any] = {
        "target": target,
        "layers": layers,
        "batch": batch,
        "seq": seq,
        "trial": asdict(trial) if trial else None,
        "planned": planned,
        "config": config,
        "began": time.monotonic(),
        "ends": None,
        "skip": {},
    }
    attempts = _Attempts(request, Facts(target=seen), load_timeout, progress, printed)
    while (found := attempts.run()) is None:
        pass
    return found


@dataclass
class _Attempts:
    """The children of one examination, one after the other, and what they have sent."""

    request: dict[str, Any]
    facts: Facts
    load_timeout: float
    progress: Callable[[Doing], None]
    printed: Printed | None

    def run(self) -> Examination | None:
        """Run one child from start to end. None: another can start without the variant that it died in.

        A child after another one keeps that one's end, and its facts until it knows as much.
        """
        doing, arm, is_timing, is_done = "starting", None, False, False
        last = self.request["ends"] or math.inf
        ends = min(time.monotonic() + self.load_timeout, last)
        with _child(self.request, self.printed) as (process, messages):
            for message in messages:
                if isinstance(message, float):
                    if message <= ends:
                        continue
                    if is_done:
                        break
                    if is_timing or ends == last:
                        return self.out_of_time(doing, arm)
                    return self.incomplete(
                        f"{doing} took longer than {self.load_timeout:g} s and was stopped; "
                        "--load-timeout allows it more"
                    )
                if is_done:
                    continue
                if message is None:
                    return self.incomplete(
                        f"something other than fp8doctor wrote to its channel while {doing}, "
                        "and the worker was stopped"
                    )
                if message.facts is not None:
                    if recorded(message.facts, "trial") or not recorded(self.facts, "trial"):
                        self.facts = message.facts
                elif message.doing is not None:
                    doing, arm, is_timing = message.doing.text, message.arm, message.until is not None
                    ends = min(message.until or time.monotonic() + self.load_timeout, last)
                    self.progress(message.doing)
                elif message.mistake is not None:
                    raise UserError(*message.mistake)
                elif message.failed is not None:
                    return self.failed(message.arm, message.failed, message.failed, ends)
                elif message.done:
                    is_done, ends = True, time.monotonic() + GRACE_S
            if is_done:
                return Examination(self.facts, None)
            end = _end(process.wait())
        return self.failed(arm, f"the process {end}", f"the worker {end} while {doing}", ends)

    def failed(self, arm: str | None, reason: str, problem: str, ends: float) -> Examination | None:
        """Leave out the variant that failed; None to try again without it until the clock ``ends``."""
        if arm is None:
            return self.incomplete(problem)
        if self.printed is not None:
            self.printed.failed = True
        if self.has_times:
            return self.but_for(arm, NoNumber(Reason.TOOK_PROCESS_DOWN, reason))
        self.request["ends"] = ends
        self.request["skip"][arm] = reason
        self.progress(Doing(f"{arm}: {reason}; starting again without it"))
        return None

    def out_of_time(self, doing: str, arm: str | None) -> Examination:
        """Report what a child had sent when its time was over; no other child starts."""
        trial = self.facts.trial
        sentence = f"the budget of {trial.budget_s:g} s was used up while fp8doctor was {doing}"
        if self.has_times and arm is not None:
            return self.but_for(arm, NoNumber(Reason.NO_TIME_LEFT, sentence))
        if not self.has_times and trial.why is Reason.NO_TIME_LEFT:
            trial = replace(trial, reason=sentence)
        return Examination(replace(self.facts, trial=trial), None)

    def but_for(self, arm: str, why: NoNumber) -> Examination:
        return Examination(replace(self.facts, trial=without(self.facts.trial, arm, why)), None)

    @property
    def has_times(self) -> bool:
        """Tell if a child has sent times, and not only that the trial began."""
        return recorded(self.facts, "trial") and bool(self.facts.trial.arms)

    def incomplete(self, sentence: str) -> Examination:
        trial = self.facts.trial if self.has_times else NOT_RECORDED
        gaps = {name: sentence for name in ("software", "network") if not recorded(self.facts, name)}
        gaps = {**self.facts.get("gaps", {}), **gaps}
        return Examination(replace(self.facts, trial=trial, gaps=gaps), sentence)


@contextlib.contextmanager
def _child(
    request: dict[str, Any], printed: Printed | None
) -> Iterator[tuple[subprocess.Popen[bytes], Iterator[Message | float | None]]]:
    """Yield a child process and its messages; in the end it is dead, with all that it started."""
    output = 2
    try:
        os.write(2, b"")
    except OSError:  # closed or full
        output = subprocess.DEVNULL
    listen, write = pipe()
    try:
        asked = json.dumps({**request, "channel": write, "parent": os.getpid()})
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", _BOOT, str(Path(fp8doctor.__file__).resolve()), asked],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output if printed is None else printed.file.fileno(),
                pass_fds=(write,),
                start_new_session=True,
            )
        finally:
            os.close(write)
        try:
            yield process, _messages(process, listen, printed)
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            remove_folders_of(process.pid)
    finally:
        os.close(listen)


def _messages(
    process: subprocess.Popen[bytes], listen: int, printed: Printed | None
) -> Iterator[Message | float | None]:
    """Yield messages, the clock, and None for anything else."""

    def ended() -> bool:
        if printed is not None:
            printed.limit()
        with signals_deferred():  # else poll() may leave its lock locked, and wait() waits for ever (3.11)
            return process.poll() is not None

    messages = decoder(Message)
    for line in lines_of(listen, ended, TICK_S):
        try:
            yield line if isinstance(line, float) else messages.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            yield None


def _end(code: int) -> str:
    """Word a process's end."""
    if code >= 0:
        return f"ended with exit code {code}"
    name = next((each.name for each in signal.Signals if each == -code), f"signal {-code}")
    return f"was killed by {name}" + " (out of memory?)" * (name == "SIGKILL")


MOST = 1 << 20
"""Bytes that are held back: a process may print forever."""

COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class Printed:
    """Stderr of one examination's workers, in a file without a name."""

    def __init__(self) -> None:
        self.failed = False
        """Whether a worker crashed."""
        self.cut = False
        """Whether more was printed than `MOST`."""
        self.file = tempfile.TemporaryFile("a+b")  # noqa: SIM115

    def limit(self) -> None:
        """Forget all that was printed if it is too much."""
        if os.fstat(self.file.fileno()).st_size > MOST:
            self.file.truncate(0)
            self.cut = True

    def lines(self) -> list[str]:
        """List the lines; of one that was overwritten (a progress bar) the last state."""
        self.file.seek(0)
        text = COLOURS.sub("", self.file.read().decode(errors="replace"))
        return [line.rstrip("\r").split("\r")[-1] for line in text.split("\n")]

    def counted(self) -> list[str]:
        """List each line once, with its count."""
        counts = Counter(line for line in self.lines() if line.strip())
        return [line if count == 1 else f"{line} ({count} times)" for line, count in counts.items()]
