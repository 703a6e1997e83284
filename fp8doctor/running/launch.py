"""Starts a script as Python would, with nothing between it and whoever started fp8doctor, and listens to it.

The process that was started *becomes* the script: signals, standard streams, process id, parent and exit code
are its own. A second process, in a session of its own, listens and reports when the script has ended, however
it ended. Only where the exit code is to tell what was found is it the other way round: fp8doctor then starts
the script, waits for it and hands signals on.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import resource
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import msgspec

import fp8doctor
from fp8doctor.errors import UserError
from fp8doctor.facts import Facts
from fp8doctor.facts.record import UnreadableDocument, decoder
from fp8doctor.running.messages import Ended, Imported, Message, Note, Observed, Progress, Stepped
from fp8doctor.running.rank_reports import Gathering, Telling
from fp8doctor.running.seen import Seen
from fp8doctor.running.settings import Settings

LOWEST_NUMBER = 200
"""File descriptors of ours stand above those that a script meets: its first file has the number that it would
have. Where fewer may be open, they are among the last."""

LAST = 4
"""How many numbers the last are: two for ours, and two that were handed on may lie there. A choice."""

TICK_S = 0.2
"""How often it is looked whether the script's process is still there."""

HANDED_ON = ("SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGCONT")
"""Signals that a waiting fp8doctor hands on."""

KEYS = ("SIGINT", "SIGQUIT")
"""Signals of a terminal's keys, which reach the script by themselves; handed on where a process sent them."""

OPTIONS_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")
"""Options of the interpreter whose value may be a word of its own."""


@dataclass(frozen=True)
class Script:
    """What stands behind ``run``: a file with its arguments, or ``-m`` and a module with its own."""

    arguments: tuple[str, ...]

    @property
    def is_module(self) -> bool:
        return self.arguments[0].startswith("-m")

    @property
    def file(self) -> Path | None:
        """The script's file; None for a module."""
        return None if self.is_module else Path(self.arguments[0])

    @property
    def name(self) -> str:
        """What the user would recognise."""
        first = self.arguments[0]
        return (first[2:] or self.arguments[1]) if self.file is None else self.file.name

    @property
    def folder(self) -> str | None:
        """The folder that Python puts first on ``sys.path``; None where it puts none."""
        if sys.flags.safe_path:
            return None
        if self.file is None or self.name == "-":
            return os.path.abspath("")
        return os.path.realpath(self.file if self.file.is_dir() else self.file.parent)

    @property
    def command(self) -> list[str]:
        """The interpreter with the options of this one, and what it is to run."""
        return [sys.executable, *interpreter_options(sys.orig_argv), *self.arguments]


def interpreter_options(arguments: Sequence[str]) -> Iterator[str]:
    """The interpreter's own options among its arguments: those before a script, ``-m`` or ``-c``."""
    words = iter(arguments[1:])
    for word in words:
        if word in OPTIONS_WITH_VALUE:
            yield from (word, next(words))
        elif word.startswith(("-W", "-X", "--")):
            yield word
        else:
            flags = re.match(r"-[^mc-]*", word)
            if flags is None:
                return
            if len(flags[0]) > 1:
                yield flags[0]
            if flags[0] != word:
                return


def checked_script(arguments: Sequence[str]) -> Script:
    """The script that is to be run. Raises `UserError` where there is none, or nothing can watch it."""
    if not arguments or tuple(arguments) == ("-m",):
        raise UserError("no script was named; write 'fp8doctor run train.py ARGS' or 'run -m pkg.train ARGS'")
    script = Script(tuple(arguments))
    if script.file is not None and script.name != "-" and not script.file.exists():
        raise UserError(f"no such file: {script.file}")
    if sys.flags.ignore_environment or sys.flags.no_site:
        raise UserError("Python was started with -I, -E or -S, and does not load what would watch the script")
    if not os.access(sys.executable, os.X_OK):
        raise UserError(f"cannot start {sys.executable or 'Python'}: this user may not execute it")
    return script


class _Pipes:
    """A pipe for what is told of the script, and one that closes when the report is there."""

    def __init__(self) -> None:
        self.listen, self.tell = _pipe()
        self.wait, self.reported = _pipe()

    def become_script(self, script: Script, settings: Settings) -> None:
        """Turn this process into the script. Returns only by raising `UserError`."""
        os.close(self.listen)
        os.close(self.reported)
        _close_stand_ins()
        lowest = min(LOWEST_NUMBER, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - LAST)
        tell, wait = (fcntl.fcntl(each, fcntl.F_DUPFD, lowest) for each in (self.tell, self.wait))
        package = Path(fp8doctor.__file__).resolve()
        python_path = os.environ.get("PYTHONPATH")
        request = {
            "channel": tell,
            "reported": wait,
            "package": str(package),
            "folder": script.folder,
            "python_path": python_path,
            "settings": settings._asdict(),
        }
        folder = str(package.parent / "running" / "startup")
        environment = {
            **os.environ,
            "FP8DOCTOR_RUN": json.dumps(request),
            "PYTHONPATH": os.pathsep.join([folder, *([python_path] if python_path else [])]),
        }
        try:
            os.execve(sys.executable, script.command, environment)
        except OSError as error:
            raise UserError(
                f"cannot start {sys.executable}: {error.strerror or error}; the script did not run"
            ) from None

    def close_scripts_ends(self) -> None:
        """Leave the ends that are the script's to the script."""
        os.close(self.tell)
        os.close(self.wait)


def _close_stand_ins() -> None:
    """Close what stands in for the standard streams that Python found closed: the script finds them so."""
    for number, stream in enumerate((sys.__stdin__, sys.__stdout__, sys.__stderr__)):
        if stream is None:
            os.close(number)


def _pipe() -> tuple[int, int]:
    """A pipe beside the standard streams; one of those that was closed would become its end."""
    ends = os.pipe()
    above = tuple(fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, 3) for each in ends)
    for each in ends:
        os.close(each)
    return above[0], above[1]


Say = Callable[[str], object]
"""Told what is being done."""

Others = Gathering | Telling | None
"""The way to the other processes of the job; None where there are none."""


def run_beside(
    script: Script, settings: Settings, say: Say, report: Callable[[Seen], int], others: Others = None
) -> int:
    """Become the script. A process beside it hears it to its end, calls ``report`` and ends with its code."""
    pipes, process = _Pipes(), os.getpid()
    _flush()
    if child := os.fork():
        os.waitpid(child, 0)
        pipes.become_script(script, settings)
    os.setsid()
    if os.fork():  # a child that the script did not start would come out of its os.wait()
        os._exit(0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    pipes.close_scripts_ends()
    os.dup2(2, 1)  # stdout is the script's
    seen = _heard(pipes.listen, process, say, others)
    if others is not None:
        if seen.error is not None:  # its launcher ends the others, and names the first that ended
            os.close(pipes.reported)
        others.ended(seen, patient=False)
    return report(seen)


def run_below(
    script: Script, settings: Settings, say: Say, report: Callable[[Seen], int], others: Others = None
) -> int:
    """Start the script, hear it to its end and report. Its exit code if it failed, else that of the
    report."""
    pipes = _Pipes()
    _flush()
    ours = {getattr(signal, name) for name in (*KEYS, *HANDED_ON)}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ours)  # one that came now would leave the script alone
    child = os.fork()
    if not child:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        pipes.become_script(script, settings)
    keys = {getattr(signal, name) for name in KEYS}
    threading.Thread(target=_hand_keys_on, args=(keys, child), daemon=True).start()

    def hand_on(number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)

    for name in HANDED_ON:
        signal.signal(getattr(signal, name), hand_on)
    signal.pthread_sigmask(signal.SIG_SETMASK, {*before, *keys})
    pipes.close_scripts_ends()
    seen = _heard(pipes.listen, child, say, others)
    if others is not None:
        others.ended(seen, patient=True)
    stdout = os.dup(1)
    os.dup2(2, 1)
    reported = report(seen)
    os.dup2(stdout, 1)
    os.close(pipes.reported)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status < 0:
        _die_of(-status)
    return status or reported


def _hand_keys_on(keys: Iterable[int], child: int) -> None:
    """Hand on what a process sends, such as ``kill -INT`` or a supervisor: only the kernel tells the whole
    terminal. Every thread has these signals blocked."""
    while True:
        arrived = signal.sigwaitinfo(keys)
        if arrived.si_code <= 0 and arrived.si_pid != child:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, arrived.si_signo)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            if stream is not None:  # its file was closed
                stream.flush()


def _die_of(number: int) -> None:
    """End by the signal that ended the script, so that whoever waits sees the same."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    signal.pthread_kill(threading.get_ident(), number)


def _heard(listen: int, process: int, say: Say, others: Others) -> Seen:
    """Listen until the script has ended. What it forks may keep the pipe open for longer."""
    seen, messages = Seen(running=True), decoder(Message)
    for line in _lines(listen, process):
        try:
            message = messages.decode(line)
            if isinstance(message, Observed):
                seen.facts, seen.complete = Facts.from_dict(message.facts), message.complete
        except (msgspec.MsgspecError, UnicodeDecodeError, UnreadableDocument):
            continue  # the line broke off
        if isinstance(message, Imported):
            seen.torch = True
        elif isinstance(message, Note):
            seen.notes.append(message.text)
        elif isinstance(message, Progress):
            say(message.text)
        elif isinstance(message, Stepped):
            seen.stepped_in_fork |= message.forked
            seen.stepped |= not message.forked
        elif isinstance(message, Ended):
            seen.ended, seen.steps, seen.error = True, message.steps, message.error
            seen.all_steps = message.all_steps
            break
        if others is not None and isinstance(message, Imported | Observed):
            others.changed(seen)
    seen.running = False
    return seen


def _lines(listen: int, process: int) -> Iterator[bytes]:
    """The lines that arrive until the pipe is closed, or the process has ended and all of it is read."""
    os.set_blocking(listen, False)
    poller = select.poll()
    poller.register(listen, select.POLLIN)
    rest = b""
    while True:
        ended = not _alive(process)
        try:
            chunk = os.read(listen, 1 << 20)
        except BlockingIOError:
            if ended:
                return
            poller.poll(TICK_S * 1e3)
            continue
        if not chunk:
            return
        *lines, rest = (rest + chunk).split(b"\n")
        yield from lines


def _alive(process: int) -> bool:
    """Whether a process is there and has not ended; one that nobody has waited for has."""
    try:
        status = Path(f"/proc/{process}/stat").read_bytes()
    except OSError:
        return False
    return status.rpartition(b")")[2].split()[0] not in (b"Z", b"X")
