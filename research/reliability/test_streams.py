"""Standard streams that are closed, full or a terminal: no report is lost, and none is a mistake of ours."""

from __future__ import annotations

import fcntl
import os
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.report import Report
from tests.cli.command import process
from tests.facts_of import DECODER_468M
from tests.waiting import LONGEST_S

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
FULL = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "saved.json"
    Report.of(diagnose(DECODER_468M)).save(path)
    return path


def shell(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command of the shell, in which ``fp8doctor`` is this one."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHON": sys.executable}
    return subprocess.run(
        ["sh", "-c", command.replace("fp8doctor", '"$PYTHON" -m fp8doctor')],
        capture_output=True,
        text=True,
        env=environment,
        cwd=folder,
        timeout=LONGEST_S,
        check=False,
    )


STDERR = pytest.mark.parametrize("stderr", ["2>&-", pytest.param("2>/dev/full", marks=FULL)])
MODEL = """import os, sys
from torch import nn
print("loading")
print("loading", file=sys.stderr)
os.write(1, b"loading")
os.write(2, b"loading")
model = nn.Linear(64, 64)
"""


@STDERR
def test_a_report_needs_no_stderr(stderr: str, tmp_path: Path) -> None:
    """The worker says what it does on stderr, and so do libraries and the user's file."""
    (tmp_path / "model.py").write_text(MODEL)
    done = shell(f"fp8doctor model.py --no-trial --save saved.json {stderr}", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "model.py" in done.stdout
    assert "loading" not in done.stdout
    assert (tmp_path / "saved.json").stat().st_size


@STDERR
@pytest.mark.parametrize("words", ["none.py", "demo --fail-on wrong", "explain NONESUCH"])
def test_a_sentence_that_cannot_be_said_keeps_its_exit_code(words: str, stderr: str, tmp_path: Path) -> None:
    done = shell(f"fp8doctor {words} {stderr}", tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "")


@pytest.mark.parametrize(
    ("stdout", "why"),
    [
        (">&-", "Bad file descriptor"),
        pytest.param(">/dev/full", "No space left on device", marks=FULL),
    ],
)
@pytest.mark.parametrize("words", ["demo --save saved.json", "list", "explain CMP001", "--version", "--help"])
def test_a_stdout_that_takes_nothing_is_a_sentence(words: str, stdout: str, why: str, tmp_path: Path) -> None:
    done = shell(f"fp8doctor {words} {stdout}", tmp_path)
    assert (done.returncode, done.stderr) == (2, f"fp8doctor: cannot write to stdout: {why}\n")
    if "--save" in words:
        assert (tmp_path / "saved.json").stat().st_size


@pytest.mark.parametrize("stdout", [">&-", pytest.param(">/dev/full", marks=FULL)])
def test_a_report_in_a_file_needs_no_stdout(stdout: str, tmp_path: Path) -> None:
    done = shell(f"fp8doctor demo -o report.txt {stdout}", tmp_path)
    assert done.returncode == 0
    assert done.stderr.endswith("fp8doctor: wrote report.txt\n")
    assert (tmp_path / "report.txt").stat().st_size


@pytest.mark.parametrize("closed", ["<&-", "<&- >&- 2>&-"])
def test_files_do_not_take_the_place_of_closed_streams(closed: str, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    done = shell(f"fp8doctor model.py --no-trial -q -o report.txt {closed}", tmp_path)
    assert (done.returncode, done.stdout) == (0, "")
    assert "model.py" in (tmp_path / "report.txt").read_text()


def test_ctrl_c_while_libraries_are_imported(tmp_path: Path) -> None:
    (tmp_path / "click.py").write_text("raise KeyboardInterrupt")
    done = subprocess.run(
        [sys.executable, "-m", "fp8doctor", "demo"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=LONGEST_S,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "fp8doctor: interrupted\n")


def test_ascii_where_stdout_is(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "latin-1")
    result = process("report", saved)
    assert result.returncode == 0
    assert result.stdout.isascii()
    assert process("report", saved, "--format", "markdown", encoding="latin-1").returncode == 0


@pytest.mark.parametrize(("fail_on", "code"), [("warning", 1), ("never", 0)])
def test_a_reader_who_leaves_early_changes_no_exit_code(saved: Path, fail_on: str, code: int) -> None:
    options = f"--format json --select CMP001 --fail-on {fail_on}".split()
    command = [sys.executable, "-m", "fp8doctor", "report", str(saved), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT) as running:
        assert running.stdout
        assert running.stderr
        running.stdout.close()
        assert len(running.stderr.read().splitlines()) == code
        assert running.wait(LONGEST_S) == code


@pytest.mark.parametrize("terminal", ["xterm-256color", "dumb"])
def test_on_a_real_terminal(saved: Path, terminal: str) -> None:
    """Colours unless it is dumb, and no line wider than the terminal."""
    outside, inside = os.openpty()
    fcntl.ioctl(inside, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
    environment = {name: each for name, each in os.environ.items() if name not in ("COLUMNS", "LINES")}
    command = [sys.executable, "-m", "fp8doctor", "report", str(saved)]
    with subprocess.Popen(command, stdout=inside, cwd=ROOT, env=environment | {"TERM": terminal}) as running:
        os.close(inside)
        screen = b""
        while running.poll() is None or b"More:" not in screen:
            try:
                screen += os.read(outside, 1 << 16)
            except OSError:
                break
    os.close(outside)
    text = screen.decode()
    assert ("\x1b[" in text) is (terminal != "dumb")
    assert max(len(line) for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()) <= 60
