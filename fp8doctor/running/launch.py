"""Start a script as Python would, and listen to it from another process.

The process becomes the script: signals, streams, process id, parent and exit code are the script's. A second
process in its own session listens. It reports once the steps are watched, and completes the report when the
script has ended. Only if a gate decides the exit code does fp8doctor stay the parent, wait and forward
signals.
"""

import contextlib
import json
import os
import re
import resource
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from fp8doctor.errors import UserError
from fp8doctor.facts import Facts
from fp8doctor.facts.record import UnreadableDocument, decoder
from fp8doctor.pipes import lines_of, pipe
from fp8doctor.running.rank_reports import RankReports, is_running
from fp8doctor.running.script_messages import Message, ScriptState, WatchOptions

TICK_S = 0.2
"""Seconds between looks at the script's process."""

FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT)
"""Signals that a waiting fp8doctor forwards."""

KEYS = (signal.SIGINT, signal.SIGQUIT)
"""Signals of a terminal's keys, which reach the script directly; forwarded if another process sent them."""

OPTIONS_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")
"""Options of the interpreter that take the next word as a value."""


@dataclass(frozen=True)
class Script:
    """A file with its arguments, or ``-m`` and a module with its own."""

    arguments: tuple[str, ...]

    @property
    def is_module(self) -> bool:
        return self.arguments[0].startswith("-m")

    @property
    def file(self) -> Path | None:
        return None if self.is_module else Path(self.arguments[0])

    @property
    def name(self) -> str:
        first = self.arguments[0]
        return (first[2:] or self.arguments[1]) if self.file is None else self.file.name

    @property
    def folder(self) -> str | None:
        """Return the folder that Python puts first on ``sys.path``, or None."""
        if sys.flags.safe_path:
            return None
        if self.file is None or self.name == "-":
            return os.path.abspath("")
        return os.path.realpath(self.file if self.file.is_dir() else self.file.parent)


def interpreter_options(arguments: Sequence[str]) -> Iterator[str]:
    """Yield the interpreter's options: those before a script, ``-m`` or ``-c``."""
    words = iter(arguments[1:])
    for word in words:
        if word in OPTIONS_WITH_VALUE:
            yield from (word, next(words))
        elif word.startswith(("-W", "-X", "--")):
            yield word
        else:
            flags = re.match(r"-[^mc-]*", word)
            if flags and len(flags[0]) > 1:
                yield flags[0]
            if not flags or flags[0] != word:
                return


def checked_script(arguments: Sequence[str]) -> Script:
    """Return the script to run. Raises `UserError` if nothing can watch it."""
    if not arguments or tuple(arguments) == ("-m",):
        raise UserError("no script was named; write 'fp8doctor run train.py ARGS' or 'run -m pkg.train ARGS'")
    script = Script(tuple(arguments))
    if script.file is not None and script.name != "-" and not os.path.exists(script.file):
        raise UserError(f"no such file: {script.file}")
    if sys.flags.ignore_environment or sys.flags.no_site:
        raise UserError("Python was started with -I, -E or -S, and does not load what would watch the script")
    if not os.access(sys.executable, os.X_OK):
        raise UserError(f"cannot start {sys.executable or 'Python'}: this user may not execute it")
    return script


def run_script(
    script: Script,
    settings: WatchOptions,
    *,
    gated: bool,
    say: Callable[[str], object],
    early: Callable[[ScriptState, int], object],
    report: Callable[[ScriptState], int],
    others: RankReports | None,
) -> int:
    """Run a script and report on it in another process. Returns the exit code.

    This process becomes the script, and a second one listens, reports and exits; if ``gated``, the script is
    a child, whose failure or the report's code is returned. ``say`` shows a line of progress, ``early``
    reports while the script runs, after so many steps, ``report`` completes the report and returns a code.
    ``others`` are the job's other processes, if any.
    """
    messages, end, process = pipe(), pipe(), os.getpid()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # full, or closed
            stream.flush()
    if gated:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, (*KEYS, *FORWARDED))
        if not (process := os.fork()):
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            _become_script(script, settings, messages, end)
        threading.Thread(target=_forward_signals, args=(process,), daemon=True).start()
        stdout = os.dup(1)
    else:
        if child := os.fork():
            os.waitpid(child, 0)
            _become_script(script, settings, messages, end)
        os.setsid()
        if os.fork():  # else the script's os.wait() would return it
            os._exit(0)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    (listen, write), (wait, reported) = messages, end
    os.close(write)
    os.close(wait)
    os.dup2(2, 1)  # stdout is the script's
    state = _listened(listen, process, say, early, others)
    if others is not None:
        if state.error is not None and not gated:  # its launcher names the first rank that ended
            os.close(reported)
        others.ended(state, patient=gated)
    code = report(state)
    if not gated:
        return code
    os.dup2(stdout, 1)
    os.close(reported)
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    if status < 0:
        _die_of(-status)
    return status or code


def _become_script(
    script: Script, settings: WatchOptions, messages: tuple[int, int], end: tuple[int, int]
) -> None:
    """Replace this process by the script, which writes messages and waits for the end of a pipe.

    Returns only by raising `UserError`.
    """
    for number, stream in enumerate((sys.__stdin__, sys.__stdout__, sys.__stderr__)):
        if stream is None:  # closed: Python has opened a stand-in
            os.close(number)
    (listen, write), (wait, reported) = messages, end
    os.close(listen)
    os.close(reported)
    os.set_inheritable(write, True)
    os.set_inheritable(wait, True)
    python_path = os.environ.get("PYTHONPATH")
    request = {
        "channel": write,
        "reported": wait,
        "folder": script.folder,
        "python_path": python_path,
        "settings": settings._asdict(),
    }
    startup = str(Path(__file__).resolve().parent / "startup")
    environment = {
        **os.environ,
        "FP8DOCTOR_RUN": json.dumps(request),
        "PYTHONPATH": os.pathsep.join(filter(None, (startup, python_path))),
    }
    command = [sys.executable, *interpreter_options(sys.orig_argv), *script.arguments]
    try:
        os.execve(sys.executable, command, environment)
    except OSError as error:
        why = error.strerror or error
        raise UserError(f"cannot start {sys.executable}: {why}; the script did not run") from None


def _listened(
    listen: int,
    process: int,
    say: Callable[[str], object],
    early: Callable[[ScriptState, int], object],
    others: RankReports | None,
) -> ScriptState:
    state, messages = ScriptState(running=True), decoder(Message)
    for line in lines_of(listen, lambda: not is_running(process), TICK_S):
        if isinstance(line, float):
            continue
        try:
            message = messages.decode(line)
            if message.facts is not None:
                state.facts = Facts.from_dict(message.facts)
        except (msgspec.MsgspecError, UnicodeDecodeError, UnreadableDocument):
            continue  # the line broke off
        state.take(message)
        if message.progress is not None:
            say(message.progress)
        if message.watched is not None:
            early(state, message.watched)
        if state.ended:
            break
        if others is not None and (message.torch or message.facts is not None):
            others.changed(state)
    state.running = False
    return state


def _forward_signals(child: int) -> None:
    """Forward signals, but not a terminal's keys, which it sends to the whole group."""
    while True:
        arrived = signal.sigwaitinfo((*KEYS, *FORWARDED))
        from_another = arrived.si_code <= 0 and arrived.si_pid != child
        if arrived.si_signo in FORWARDED or from_another:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, arrived.si_signo)


def _die_of(number: int) -> None:
    """End by the signal that ended the script."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    signal.pthread_kill(threading.get_ident(), number)
