"""Examine a target in a process of its own, so that whatever user code does there costs one process and no report.

The caller imports neither torch nor user code. The child sends one JSON message a line over a pipe of its own, never
over stdout; what user code prints goes to the caller's stderr. The child leads a process group that ends with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gzip
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

import fp8doctor
from fp8doctor.discovery import in_words
from fp8doctor.errors import UserError
from fp8doctor.facts import Facts, Target, Trial, recorded
from fp8doctor.job import Job
from fp8doctor.kept import without
from fp8doctor.load import compiled, load, locate
from fp8doctor.order import TrialOrder
from fp8doctor.record import UnreadableDocument, decoder, settle
from fp8doctor.scrub import scrub

TICK_S = 0.1
"""How often the deadline and the end of the child are looked at while nothing is sent."""

GRACE_S = 2.0
"""How long a child that has said everything may take to run its exit handlers."""

MOST_WORKERS = 4
"""Workers that may die of one arm each before the trial is given up."""

TRIAL_LIMIT, TRIAL_GRACE_S = 3.0, 60.0
"""One stage of the trial is a hang after so many budgets and seconds."""

PR_SET_PDEATHSIG = 1
"""``prctl`` option: the signal a process gets when its parent dies. Source: linux/prctl.h."""

_BOOT = """\
import importlib.util, sys
spec = importlib.util.spec_from_file_location("fp8doctor", sys.argv[1])
sys.modules["fp8doctor"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["fp8doctor"])
from fp8doctor.worker import serve
serve(sys.argv[2])
"""
"""What the child runs, under ``-P``: this very fp8doctor, wherever it lies, with nothing of it or of the current folder
on ``sys.path``."""


class Stage(msgspec.Struct, tag=True):
    """The child begins something; ``text`` completes "while ..."."""

    text: str
    timing: bool = False
    """Whether it belongs to the trial, which has a limit of its own."""
    arm: str | None = None
    """The arm of the trial that is being built, which is left out if the child dies of it."""


class Examined(msgspec.Struct, tag=True):
    """Everything that is known so far."""

    facts: dict[str, Any]


class Traced(msgspec.Struct, tag=True):
    """The trace of an arm was kept in a file, or could not be."""

    file: str
    problem: str | None = None


class Mistake(msgspec.Struct, tag=True):
    """A `UserError`."""

    message: str
    detail: str


class Lost(msgspec.Struct, tag=True):
    """An arm left the GPU unusable for this process."""

    arm: str
    reason: str


class Failure(msgspec.Struct, tag=True):
    """fp8doctor itself failed, in a sentence."""

    sentence: str


class Done(msgspec.Struct, tag=True):
    """Nothing more will be sent."""


Message = Stage | Examined | Traced | Mistake | Lost | Failure | Done


@dataclass(frozen=True)
class Examination:
    """What a worker found out."""

    facts: Facts
    problem: str | None
    """Why the facts are incomplete, in a sentence; None when everything was examined."""
    traces: dict[str, str | None] = field(default_factory=dict)
    """File of a trace -> why it could not be written, None where it was."""


def examine_in_worker(
    target: str | None,
    *,
    layers: int | None = None,
    batch: int | None = None,
    seq: int | None = None,
    load_timeout: float = 600,
    trial: TrialOrder | None = None,
    progress: Callable[[str], None],
) -> Examination:
    """Examine ``target`` (None: environment and GPUs only) in a child process, time it if a trial is ordered, and wait.

    Raises `UserError` for what the user can mend. A child that dies, hangs or talks nonsense costs what it had not yet
    said: the facts so far come back with the problem. One that dies of an arm of the trial is followed by another
    without that arm, `MOST_WORKERS` in all; when the times were known before, they are kept.
    """
    source = locate(target) if target is not None else None
    if source is not None and source.path is not None:
        compiled(source.path)
    facts = Facts(target=source.target() if source else Target(kind="environment", name="environment", attribute=None))
    request: dict[str, Any] = {"target": target, "layers": layers, "batch": batch, "seq": seq, "trial": asdict(trial) if trial else None, "skip": {}}
    traces: dict[str, str | None] = {}
    for _ in range(MOST_WORKERS):
        try:
            return replace(_examined(request, facts, load_timeout, progress, traces), traces=traces)
        except _ArmFailed as failed:
            request["skip"][failed.arm] = failed.reason
            progress(f"{failed.arm}: {failed.reason}; starting again without it")
    return _incomplete(facts, f"{MOST_WORKERS} workers in a row died of the trial: " + "; ".join(f"{arm}: {why}" for arm, why in request["skip"].items()))


class _ArmFailed(Exception):
    """The child died, or lost its GPU, while it built or timed an arm."""

    def __init__(self, arm: str, reason: str) -> None:
        super().__init__(reason)
        self.arm, self.reason = arm, reason


def _examined(request: dict[str, Any], facts: Facts, load_timeout: float, progress: Callable[[str], None], traces: dict[str, str | None]) -> Examination:
    """One child from its start to its end. ``traces`` takes the files that it writes."""
    doing, began, limit, arm = "starting", time.monotonic(), load_timeout, None
    trial_limit = TRIAL_LIMIT * request["trial"]["budget_s"] + TRIAL_GRACE_S if request["trial"] else load_timeout
    messages = decoder(Message)
    with _Child(request) as child:
        for line in child.lines():
            if line is None:
                if time.monotonic() - began > limit:
                    if arm is not None:
                        return _without(facts, arm, f"it took longer than {limit:g} s")
                    return _incomplete(facts, f"{doing} took longer than {limit:g} s and was stopped; --load-timeout allows it more")
                continue
            try:
                message = messages.decode(line)
                if isinstance(message, Examined):
                    facts = Facts.from_dict(message.facts)
            except (msgspec.MsgspecError, UnicodeDecodeError, UnreadableDocument):
                return _incomplete(facts, f"something other than fp8doctor wrote to its channel while {doing}, and the worker was stopped")
            if isinstance(message, Stage):
                doing, began, limit, arm = message.text, time.monotonic(), trial_limit if message.timing else load_timeout, message.arm
                progress(doing)
            elif isinstance(message, Traced):
                traces[message.file] = message.problem
            elif isinstance(message, Lost):
                return _without(facts, message.arm, message.reason)
            elif not isinstance(message, Examined):
                child.finish()
                if isinstance(message, Mistake):
                    raise UserError(message.message, message.detail)
                return _incomplete(facts, message.sentence) if isinstance(message, Failure) else Examination(facts, None)
        end = _end(child.returncode)
        if arm is not None:
            return _without(facts, arm, f"the process {end}")
        return _incomplete(facts, f"the worker {end} while {doing}")


def _without(facts: Facts, arm: str, reason: str) -> Examination:
    """The trial that was known before the child failed at what it can do without. Raises `_ArmFailed` when none was."""
    if not recorded(facts.trial):
        raise _ArmFailed(arm, reason)
    return Examination(msgspec.structs.replace(facts, trial=without(facts.trial, arm, reason)), None)


def _incomplete(facts: Facts, sentence: str) -> Examination:
    gaps = dict(facts.gaps) if recorded(facts.gaps) else {}
    gaps.update({name: sentence for name in ("software", "network") if not recorded(getattr(facts, name))})
    return Examination(msgspec.structs.replace(facts, gaps=gaps), sentence)


def _end(returncode: int) -> str:
    """How a process ended, in words."""
    if returncode >= 0:
        return f"ended with exit code {returncode}"
    try:
        name = signal.Signals(-returncode).name
    except ValueError:
        name = f"signal {-returncode}"
    return f"was killed by {name} (out of memory?)" if name == "SIGKILL" else f"was killed by {name}"


def _stderr() -> int:
    """Where the child prints: this process's stderr, or nowhere where that is closed."""
    try:
        os.fstat(2)
    except OSError:
        return subprocess.DEVNULL
    return 2


class _Child:
    """The child process as its parent holds it: its messages, and the certainty that it is gone afterwards."""

    def __init__(self, request: dict[str, Any]) -> None:
        output = _stderr()
        self._read_end, write_end = os.pipe()
        try:
            os.set_blocking(self._read_end, False)
            request = {**request, "channel": write_end, "parent": os.getpid(), "read_end": self._read_end}
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _BOOT, str(Path(fp8doctor.__file__).resolve()), json.dumps(request)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(write_end,),
                start_new_session=True,
            )
        except BaseException:
            os.close(self._read_end)
            raise
        finally:
            os.close(write_end)

    def __enter__(self) -> _Child:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None) -> None:
        """Kill what is left of the process group, reap the child, close the pipe."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._read_end)

    @property
    def returncode(self) -> int:
        return self._process.wait()

    def finish(self) -> None:
        """Let a child that has said everything run its exit handlers."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(GRACE_S)

    def lines(self) -> Iterator[bytes | None]:
        """The lines that arrive, and None at every tick without one, until the child has ended.

        The end of the pipe is not the end of the child: user code may close it, and `_Channel` then opens it again;
        nor does an open pipe mean a living child: a process forked by user code holds it too.
        """
        poller = select.poll()
        poller.register(self._read_end, select.POLLIN)
        rest = b""
        while True:
            ended = self._process.poll() is not None
            try:
                chunk = os.read(self._read_end, 1 << 20)
            except BlockingIOError:
                chunk = None
            if chunk:
                *lines, rest = (rest + chunk).split(b"\n")
                yield from lines
                continue
            if ended:
                return
            if chunk is None:
                poller.poll(TICK_S * 1e3)
            else:
                time.sleep(TICK_S)
            yield None


class _Channel:
    """The child's way to its parent. User code may close it, fork, or reuse its number: it is opened again, or left alone."""

    def __init__(self, request: dict[str, Any]) -> None:
        self._pid = os.getpid()
        self._fd = os.dup(request["channel"])
        os.close(request["channel"])
        self._pipe = os.fstat(self._fd).st_ino
        self._again = f"/proc/{request['parent']}/fd/{request['read_end']}"

    def send(self, message: Message) -> None:
        """Send one message. A copy of the child that user code forked ends here instead."""
        if os.getpid() != self._pid:
            os._exit(0)
        line = msgspec.json.encode(message) + b"\n"
        self._reopen()
        while line:
            line = line[os.write(self._fd, line) :]

    def _reopen(self) -> None:
        try:
            mine = os.fstat(self._fd).st_ino == self._pipe
        except OSError:
            mine = False
        if not mine:
            self._fd = os.open(self._again, os.O_WRONLY | os.O_CLOEXEC)


def serve(request: str) -> None:
    """The child: examine what the request names, send everything as it comes."""
    asked = json.loads(request)
    _die_with(asked["parent"])
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    channel = _Channel(asked)
    try:
        _examine(channel, asked)
        channel.send(Done())
    except UserError as error:
        channel.send(Mistake(settle(str(error)), settle(error.detail)))
    except BaseException as error:
        frame, line = list(traceback.walk_tb(error.__traceback__))[-1]
        channel.send(Failure(settle(scrub(f"fp8doctor failed: {in_words(error)} ({os.path.basename(frame.f_code.co_filename)}:{line})"))))


def _examine(channel: _Channel, asked: dict[str, Any]) -> None:
    channel.send(Stage("reading the environment"))
    from fp8doctor.examine import examine, examine_surroundings

    if asked["target"] is None:
        channel.send(Examined(examine_surroundings(Target(kind="environment", name="environment", attribute=None)).to_dict()))
        return
    target = locate(asked["target"]).target()
    channel.send(Examined(examine_surroundings(target).to_dict()))
    channel.send(Stage(f"loading {target.name}"))
    job = load(asked["target"], layers=asked["layers"], batch=asked["batch"], seq=asked["seq"])
    channel.send(Stage(f"examining {target.name}"))
    # Loading may have changed variables and imports: the surroundings are read again.
    facts = examine(job)
    channel.send(Examined(facts.to_dict()))
    if asked["trial"] is not None:
        order = TrialOrder(**asked["trial"])
        tried = _trial(channel, job, facts, order, asked["skip"])
        if tried is not None:
            channel.send(Examined(msgspec.structs.replace(facts, trial=tried).to_dict()))


def _trial(channel: _Channel, job: Job, facts: Facts, order: TrialOrder, skip: dict[str, str]) -> Trial | None:
    """Time the job and what the checks would change about it; None where there is nothing to time it on."""
    from fp8doctor.diagnose import diagnose
    from fp8doctor.trial import DeviceLost, choose_device, run_trial

    device = choose_device(order.device)
    if device is None:
        return None
    hypotheses = diagnose(facts, select=order.select, ignore=order.ignore, checks=tuple(map(Path, order.checks))).prescription

    def progress(text: str, arm: str | None) -> None:
        channel.send(Stage(text, timing=True, arm=arm))

    def keep_trace(arm: str, trace: Path) -> None:
        file = order.trace_of(arm)
        if file is not None:
            channel.send(_kept(trace, file))

    def keep(trial: Trial) -> None:
        channel.send(Examined(msgspec.structs.replace(facts, trial=trial).to_dict()))

    try:
        return run_trial(job, facts, hypotheses, device, budget_s=order.budget_s, progress=progress, skip=skip, keep_trace=keep_trace, keep=keep)
    except DeviceLost as lost:
        channel.send(Lost(lost.arm, str(lost)))
        os._exit(1)


def _kept(trace: Path, file: Path) -> Traced:
    """Copy a trace to where it was asked for, compressed when the name says so."""
    try:
        with trace.open("rb") as source, gzip.open(file, "wb", compresslevel=6) if file.suffix == ".gz" else file.open("wb") as target:
            shutil.copyfileobj(source, target)
    except OSError as error:
        return Traced(settle(str(file)), settle(error.strerror or str(error)))
    return Traced(settle(str(file)))


def _die_with(parent: int) -> None:
    """End with the parent, where the system can arrange it."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
