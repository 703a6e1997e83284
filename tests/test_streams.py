"""Standard streams that are closed or full: no report is lost, and none of it is called a mistake of ours."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import LONGEST_S

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
FULL = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")


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


@pytest.mark.gate("2>&-")
@STDERR
def test_a_report_needs_no_stderr(stderr: str, tmp_path: Path) -> None:
    """The worker says what it does on stderr, and so do libraries and the user's file."""
    (tmp_path / "model.py").write_text(MODEL)
    done = shell(f"fp8doctor model.py --no-trial --save saved.json {stderr}", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "model.py" in done.stdout
    assert "loading" not in done.stdout
    assert (tmp_path / "saved.json").stat().st_size


@pytest.mark.gate("none.py-2>&-", "explain NONESUCH-2>/dev/full")
@STDERR
@pytest.mark.parametrize("words", ["none.py", "demo --fail-on wrong", "explain NONESUCH"])
def test_a_sentence_that_cannot_be_said_keeps_its_exit_code(words: str, stderr: str, tmp_path: Path) -> None:
    done = shell(f"fp8doctor {words} {stderr}", tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "")


@pytest.mark.gate(
    "demo --save saved.json->/dev/full-No space left on device",
    "list->&--Bad file descriptor",
    "--version->/dev/full-No space left on device",
)
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


@pytest.mark.gate("<&-")
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
