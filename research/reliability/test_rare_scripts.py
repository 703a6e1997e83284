"""Scripts under ``fp8doctor run`` at the limits of a system, and with signals at the worst moment."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest

from fp8doctor.running.observer import ScriptObserver
from tests.running import conftest
from tests.running.conftest import Heard
from tests.running.loops import Net, train
from tests.running.test_script import in_a_shell, run, script

heard, observer, stop_on_nan = conftest.heard, conftest.observer, conftest.stop_on_nan

pytestmark = pytest.mark.slow


def test_a_low_limit_of_open_files(tmp_path: Path) -> None:
    script(tmp_path, "print(open('train.py').fileno())")
    command = ["-m", "fp8doctor", "run", "train.py"]
    code, out, err = in_a_shell('ulimit -n 32; exec "$@"', command, tmp_path)
    assert (code, out) == (0, "3\n"), err


INTERRUPTED = """
import signal, time
got = []
signal.signal(signal.SIGINT, lambda number, frame: got.append(number))
print("ready", flush=True)
while not got:
    time.sleep(0.01)
time.sleep(0.5)
print(len(got), "times", flush=True)
"""


def test_a_key_of_the_terminal_reaches_a_script_below_a_gate_once(tmp_path: Path) -> None:
    """The kernel tells both processes, and fp8doctor hands nothing on."""
    import pty

    pid, terminal = pty.fork()
    if not pid:
        os.chdir(tmp_path)
        arguments = script(tmp_path, INTERRUPTED)
        os.execv(sys.executable, [sys.executable, "-m", "fp8doctor", "run", "--fail-on", "error", *arguments])
    seen = b""
    while b"ready" not in seen:
        seen += os.read(terminal, 1000)
    os.write(terminal, b"\x03")
    while b"times" not in seen:
        seen += os.read(terminal, 1000)
    os.close(terminal)
    os.waitpid(pid, 0)
    assert b"1 times" in seen


IMPATIENT = """
import os, signal, sys
signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(7))
import atexit, select
select.select = lambda *arguments: signal.raise_signal(signal.SIGTERM)
sys.exit(5)
"""


def test_a_handler_that_exits_while_the_report_is_written_leaves_no_trace_of_ours(tmp_path: Path) -> None:
    code, _, err = run(["-m", "fp8doctor", "run", *script(tmp_path, IMPATIENT)], tmp_path)
    assert code == 5
    assert "attached.py" not in err
    assert "Traceback" not in err


@pytest.mark.parametrize("gate", [[], ["--fail-on", "error"]])
def test_a_script_that_cannot_be_started_is_a_sentence(tmp_path: Path, gate: list[str]) -> None:
    """One argument of a command may have 128 KiB."""
    arguments = [*script(tmp_path, "print('ran')"), "x"]
    start = "import sys; sys.argv[-1] = 'x' * 2**18; from fp8doctor.cli import main; main(sys.argv[1:])"
    code, out, err = run(["-c", start, "run", *gate, *arguments], tmp_path)
    assert (code, out) == (2, "")
    assert "Argument list too long; the script did not run" in err
    assert "internal error" not in err


class Preempted(Exception):
    """What a script's own handler raises."""


def test_what_a_handler_of_the_script_raises_reaches_the_script(
    observer: ScriptObserver, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    def preempt(number: int, frame: Any) -> None:
        raise Preempted

    note = observer.note

    def interrupted(*arguments: Any) -> None:
        signal.raise_signal(signal.SIGUSR1)
        note(*arguments)

    monkeypatch.setattr(observer, "note", interrupted)
    before = signal.signal(signal.SIGUSR1, preempt)
    try:
        with pytest.raises(Preempted) as raised:
            train(Net(), 1)
        frames = [each.filename for each in traceback.extract_tb(raised.value.__traceback__)]
        assert not [each for each in frames if "fp8doctor/running" in each or "contextlib" in each]
        assert signal.getsignal(signal.SIGUSR1) is preempt
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert heard.notes == []
    assert len(heard.facts.network.linears) == 4
