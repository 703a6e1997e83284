"""The command line in a process of its own: signals, pipes, a terminal, what it imports, and a model file."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from tests.cli.command import ROOT, TRACEBACK, process
from tests.waiting import LONGEST_S


def heed_interrupts() -> None:
    """A job that a shell put into the background ignores SIGINT, and so would its children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.slow
def test_ctrl_c_of_a_real_process(tmp_path: Path) -> None:
    script = (
        "import sys, time, types\n"
        "def examine_in_worker(*args, **options): print('ready', flush=True); time.sleep(1000)\n"
        "sys.modules['fp8doctor.worker.parent'] = "
        "types.SimpleNamespace(examine_in_worker=examine_in_worker)\n"
        "from fp8doctor.cli import main\n"
        "main(['model.py'])\n"
    )
    command = [sys.executable, "-c", script]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT}
    running = subprocess.Popen(command, preexec_fn=heed_interrupts, **pipes)
    assert running.stdout
    assert running.stdout.readline() == "ready\n"
    running.send_signal(signal.SIGINT)
    _, stderr = running.communicate(timeout=LONGEST_S)
    assert running.returncode == 130
    assert stderr.endswith("fp8doctor: interrupted\n")
    assert "Traceback" not in stderr


@pytest.mark.slow
def test_ascii_where_stdout_is(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "latin-1")
    result = process("report", saved)
    assert result.returncode == 0
    assert result.stdout.isascii()
    assert process("report", saved, "--format", "markdown", encoding="latin-1").returncode == 0


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize(
    "args",
    [
        ("--help",),
        ("--version",),
        ("list",),
        ("explain", "CMP001"),
        ("explain", "lora"),
        ("explain", TRACEBACK),
        ("report", "saved.json"),
        ("compare", "saved.json", "saved.json"),
    ],
)
def test_torch_is_not_imported(args: tuple[str, ...], saved: Path) -> None:
    args = tuple(str(saved) if arg == "saved.json" else arg for arg in args)
    script = (
        f"import sys\nfrom fp8doctor.cli import main\ntry:\n    main({args!r})\nfinally:\n    assert "
        "'torch' not in sys.modules, 'torch was imported'\n"
    )
    assert subprocess.check_output([sys.executable, "-c", script], cwd=ROOT, timeout=LONGEST_S)


@pytest.mark.slow
def test_a_model_file_from_end_to_end(tmp_path: Path) -> None:
    (tmp_path / "small.py").write_text(
        'import torch\nprint("users own words")\nmodel = torch.nn.Sequential(torch.nn.Linear(64, 128), '
        "torch.nn.Linear(128, 64))\n"
    )
    result = process("small.py", "--format", "json", "--save", "saved.json", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["verdict"]["status"] == "no_fp8"
    assert list(document)[:2] == ["schema_version", "verdict"]
    assert "users own words" in result.stderr
    saved = json.loads((tmp_path / "saved.json").read_text("utf-8"))
    assert saved["facts"]["target"]["name"] == "small.py"
    assert (saved["verdict"], saved["outcomes"]) == (document["verdict"], document["outcomes"])


MODEL_FILE = """
import torch
from torch import nn
from torchao.float8 import convert_to_float8_training


def build_model():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).bfloat16()
    {convert}
    return model


def example_batch():
    return torch.ones(32, 64, dtype=torch.bfloat16)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("convert", "missed"),
    [
        pytest.param("convert_to_float8_training(model)", 0, marks=pytest.mark.nightly),
        ("", 1),
        pytest.param(
            "convert_to_float8_training(model, module_filter_fn=lambda *_: False)",
            1,
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_a_model_file_is_required_to_be_in_fp8(tmp_path: Path, convert: str, missed: int) -> None:
    (tmp_path / "model.py").write_text(MODEL_FILE.format(convert=convert))
    options = ("--no-trial", "--fail-on", "never", "-q")
    assert process("model.py", *options, cwd=tmp_path).returncode == 0
    required = process("model.py", *options, "--require-fp8", "--save", "saved.json", cwd=tmp_path)
    assert (required.returncode, len(required.stderr.splitlines())) == (missed, missed)
    estimated = process("report", "saved.json", *options[1:], "--min-estimated-speedup", "9", cwd=tmp_path)
    assert estimated.returncode == 1
