"""Ctrl-C, and other signals, at every moment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from itertools import product
from pathlib import Path
from types import FrameType

import pytest

from fp8doctor.signals import signals_deferred
from research.reliability.test_streams import ROOT
from tests.test_signals import NUMBERS, Asked, Script, _own_handlers, restored
from tests.waiting import LONGEST_S
from tests.worker.test_parent import python

__all__ = ["_own_handlers"]


def deferred(script: Script, sent: dict[int, signal.Signals]) -> tuple[int, Asked | None]:
    """Run a block in which each signal arrives at its Python event; the events there are, and what comes out
    of it."""
    for number in (*NUMBERS, signal.SIGINT):
        signal.signal(number, script.handle)
    events = 0

    def arrive(frame: FrameType, event: str, argument: object) -> None:
        nonlocal events
        events += 1
        if number := sent.get(events):
            os.kill(os.getpid(), number)
            sys.setprofile(arrive)  # Python takes it away where a handler raises in it

    def block() -> None:
        with signals_deferred():
            len("")

    try:
        try:
            sys.setprofile(arrive)
            block()
        finally:
            sys.setprofile(None)
    except Asked as raised:
        return events, raised
    return events, None


def last_event() -> int:
    return deferred(Script(frozenset()), {})[0]


@pytest.mark.parametrize("number", [*NUMBERS, signal.SIGINT], ids=lambda number: number.name)
def test_a_signal_at_any_moment_raises_what_its_handler_raises(number: signal.Signals) -> None:
    for at in range(1, last_event() + 1):
        script = Script(frozenset({number}))
        _, raised = deferred(script, {at: number})
        assert (script.called, raised and raised.args, restored(script)) == ([number], (number,), True), at


def test_the_handlers_are_back_where_one_raises_while_they_are_put_back() -> None:
    script = Script(frozenset({signal.SIGHUP, signal.SIGTERM}))
    last = last_event()
    for first, second in product((1, last - 200), range(last - 200, last + 1)):
        deferred(script, {first: signal.SIGUSR1, second: signal.SIGHUP})
        assert restored(script), (first, second)


def test_ctrl_c_at_any_moment_and_again_is_a_sentence() -> None:
    """Also before and behind what click itself takes for an interrupt, and while the sentence is said."""
    program = """
        import os, signal, sys
        import fp8doctor.cli.explain, fp8doctor.cli.delivery, fp8doctor.render.terminal, fp8doctor.version
        from fp8doctor.__main__ import main

        FILES = ("__main__.py", "commands.py", "console.py", "core.py", "utils.py")

        def interrupted_at(at):
            events = 0
            def count(frame, kind, argument):
                nonlocal events
                events += frame.f_code.co_filename.endswith(FILES)
                if events in at:
                    events += 1
                    os.kill(os.getpid(), signal.SIGINT)
                    sys.setprofile(count)
            sys.argv = ["fp8doctor", "--version"]
            try:
                sys.setprofile(count)
                main()
            finally:
                sys.setprofile(None)

        signal.signal(signal.SIGINT, signal.default_int_handler)
        at, gaps = 2, (30, 100, 1000)
        outcomes = {}
        while 0 not in outcomes and at < 10_000:
            listen, tell = os.pipe()
            if (process := os.fork()) == 0:
                os.dup2(tell, 2)
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
                interrupted_at((at, at + gaps[at % len(gaps)]))
            os.close(tell)
            told = os.fdopen(listen).read()
            code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
            lines = frozenset(line for line in told.splitlines() if line)
            outcomes.setdefault(128 - code if code < 0 else code, set()).update(lines)  # as a shell tells
            at += 1 if at < 50 else 7
        print(at > 500, outcomes)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
        timeout=LONGEST_S,
    )
    assert done.stdout == "True {130: {'fp8doctor: interrupted'}, 0: set()}\n"


def test_no_moment_is_wrong_for_an_interrupt(tmp_path: Path) -> None:
    """One inside `Popen.poll` leaves its lock behind, and whoever waits for the child then waits for ever."""
    (tmp_path / "waits").write_text("#!/bin/sh\nexec sleep 1000\n")
    (tmp_path / "waits").chmod(0o755)
    program = """
        import os, signal, sys
        from fp8doctor.worker.parent import _child
        sys.executable = "./waits"

        def interrupted_at(event):
            events = 0
            def count(frame, kind, argument):
                nonlocal events
                events += frame.f_code.co_filename.endswith(("subprocess.py", "parent.py"))
                if events == event:
                    events += 1
                    os.kill(os.getpid(), signal.SIGINT)
            signal.alarm(60)
            try:
                with _child({}, None) as (_, looks):
                    next(looks)
                    sys.setprofile(count)
                    try:
                        next(looks)
                    finally:
                        sys.setprofile(None)
            except KeyboardInterrupt:
                return 1
            return 2

        signal.signal(signal.SIGINT, signal.default_int_handler)
        outcomes = []
        while not outcomes or outcomes[-1] == 1:
            if (process := os.fork()) == 0:
                os._exit(interrupted_at(len(outcomes) + 1))
            outcomes.append(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))
        print(len(outcomes) > 10, set(outcomes))
    """
    assert python(program, tmp_path) == "True {1, 2}\n"
