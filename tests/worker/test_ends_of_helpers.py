"""Helpers stand still while something is timed, end with the trial, and cost nothing when they die."""

from __future__ import annotations

import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from fp8doctor.worker.ahead import Helpers
from tests.waiting import LONGEST_S, wait_for
from tests.worker.helping import ASKED, CUTS, EVERY, FOREVER, LARGE, LOADED, WORK, helpers, is_alive, state

pytestmark = pytest.mark.slow


def test_helpers_that_wait_for_more_end_with_the_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    of = helpers(monkeypatch, EVERY, count=2)
    of.begin([("a", 0)], CUTS, more=True)
    wait_for("its work", lambda: not of.under_way())
    assert of.end()
    wait_for("nobody to be employed", lambda: of._employed == 0)
    assert not of.begin(WORK, CUTS)
    assert (of.under_way(), of.outcomes()) == (frozenset(), {"a": 1.0})


def test_helpers_stand_still_while_something_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fp8doctor.worker.ahead.LONGEST_PAUSE_S", 1e6)
    of = helpers(monkeypatch, FOREVER, count=2)
    pids = [process.pid for process in of._processes]
    for interrupted in (False, True, False):
        with suppress(KeyboardInterrupt), of.paused():
            wait_for("them to stand still", lambda: [state(pid) for pid in pids] == ["T", "T"])
            if interrupted:
                raise KeyboardInterrupt
        wait_for("them to go on", lambda: "T" not in map(state, pids))
    with of.paused():
        assert of.end()
    assert not any(map(is_alive, pids))
    with of.paused():
        assert not of.end(), "nobody is there"


def test_what_helpers_were_stopped_in_is_done_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    of = helpers(monkeypatch, EVERY)
    with of.paused():
        of.begin(WORK, CUTS)
        assert of.under_way() == {"a", "b"}
    wait_for("both arms to be compiled", lambda: not of.under_way())
    assert of.outcomes() == {"a": 4.0, "b": 3.0}


def test_no_pause_holds_a_lock_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial may wait for a lock that a helper holds."""
    monkeypatch.setattr("fp8doctor.worker.ahead.LONGEST_PAUSE_S", 0.2)
    of = helpers(monkeypatch, FOREVER)
    (process,) = of._processes
    with of.paused():
        wait_for("it to go on", lambda: state(process.pid) != "T")
    assert of.end()


def test_a_stopped_helper_dies_with_the_trial() -> None:
    helper = (
        "import json, sys, time; from fp8doctor.worker.child import _die_with\n"
        "_die_with(json.loads(sys.argv[1])['parent']); print('there', flush=True); time.sleep(1e6)"
    )
    trial = (
        "import sys, time; from fp8doctor.worker import ahead; ahead.LONGEST_PAUSE_S = 1e6\n"
        f"sys.orig_argv = [sys.executable, '-c', {helper!r}, '']\n"
        f"of = ahead.Helpers({ASKED!r}, 1); (process,) = of._processes; process.stdout.readline()\n"
        f"with of.paused(): print(process.pid, flush=True); time.sleep(1e6)"
    )
    dying = subprocess.Popen([sys.executable, "-c", trial], stdout=subprocess.PIPE)
    assert dying.stdout is not None
    pid = int(dying.stdout.readline())
    wait_for("it to stand still", lambda: state(pid) == "T")
    dying.kill()
    dying.communicate(timeout=LONGEST_S)
    wait_for("its end", lambda: not is_alive(pid))


def test_one_that_dies_or_hangs_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for code in ("sys.exit(1)", "import time; time.sleep(1e6)"):
        of = helpers(monkeypatch, code)
        of.know(LARGE)
        of.begin(WORK, CUTS)
        assert of.take(("a", 1), None) is None
        assert of.end()
        assert of.wait_for_one(["a", "b"], 300.0) == {"a", "b"}, "nobody is left to compile them"
        assert of.outcomes() == {"a": None, "b": None}


def test_one_that_tells_nonsense_is_not_listened_to(monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    of = helpers(monkeypatch, f"{LOADED}\nfor line in sys.stdin: print('Aborted', flush=True)")
    of.begin(WORK, CUTS)
    wait_for("its end", lambda: not of.under_way())
    assert [of.take(each, None) for each in WORK] == [None, None, None]
    assert of.end()
    assert not raised


def test_what_a_helper_started_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers of the compiler have workers of their own."""
    sleep = "import time; time.sleep(1e6)"
    worker = (
        f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {sleep!r}]).pid); {sleep}"
    )
    code = f"import subprocess; subprocess.run([sys.executable, '-uc', {worker!r}])"
    (process,) = (of := helpers(monkeypatch, code))._processes
    assert process.stdout is not None
    pid = process.stdout.readline()
    assert is_alive(int(pid))
    of.end()
    wait_for("its end", lambda: not is_alive(int(pid)))


def test_one_that_cannot_be_started_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "orig_argv", ["/nowhere/python", ""])
    of = Helpers(ASKED, 2)
    of.load("cpu", None, 2)
    assert not of.begin(WORK, CUTS)
    assert of.take(("a", 1), None) is None
    assert not of.end()


def test_nothing_is_written_where_the_target_closed_the_pipes_of_helpers(tmp_path: Path) -> None:
    """Its own files may be under their numbers by then, as where it closes all that it does not know."""
    trial = (
        "import os, sys; from fp8doctor.worker.ahead import Helpers\n"
        "sys.orig_argv = [sys.executable, '-c', 'import sys; sys.stdin.readline()', '']\n"
        f"of = Helpers({ASKED!r}, 2); os.closerange(3, 64)\n"
        f"files = [open({str(tmp_path)!r} + f'/{{i}}', 'w') for i in range(8)]\n"
        "of.load('cpu', None, 1); assert not of.begin([('a', 0)], [None]); of.end(); del of\n"
        "for file in files: file.write('mine'); file.close()"
    )
    subprocess.run([sys.executable, "-c", trial], timeout=LONGEST_S, check=True)
    assert {file.read_text() for file in tmp_path.iterdir()} == {"mine"}
