"""The command line in a process of its own: signals, pipes, a terminal, what it imports, and a model file."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.command import ROOT, process
from tests.waiting import LONGEST_S


def heed_interrupts() -> None:
    """A job that a shell put into the background ignores SIGINT, and so would its children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.slow
def test_ctrl_c_of_a_real_process(tmp_path: Path) -> None:
    script = (
        "import time\n"
        "from fp8doctor.worker import parent\n"
        "def examine_in_worker(*args, **options): print('ready', flush=True); time.sleep(1000)\n"
        "parent.examine_in_worker = examine_in_worker\n"
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
@pytest.mark.parametrize(
    "args",
    [
        ("--help",),
        ("list",),
        ("explain", "CMP001"),
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
