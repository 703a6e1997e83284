"""The exit code that a report, a failure and Ctrl-C lead to, and the sentences beside it."""

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from fp8doctor.errors import UserError
from fp8doctor.facts import Facts, Target, Trial
from fp8doctor.facts.arm_names import Reason
from tests.cli.command import Worker, fp8doctor, timed
from tests.facts_of import DECODER_468M


@pytest.mark.parametrize(
    ("as_is_ms", "args", "code"),
    [
        (400.0, "", 1),
        (400.0, "--fail-on never", 0),
        (80.0, "--min-speedup 1.2 --strict", 0),
        (80.0, "--min-speedup 1.3", 1),
        (None, "--strict", 1),
        (None, "", 0),
    ],
)
def test_examining_holds_the_gates_of_reports(
    worker: Worker, as_is_ms: float | None, args: str, code: int
) -> None:
    """Every gate is in ``tests/test_gate.py``."""
    worker.facts = DECODER_468M if as_is_ms is None else timed(as_is_ms)
    assert fp8doctor("model.py", *args.split()).exit_code == code


def test_a_users_mistake_is_a_sentence_and_their_own_frames(worker: Worker) -> None:
    worker.error = UserError(
        "model.py could not be loaded: KeyError: \x1b[31m'x'", '  File "model.py", line 3\n    x["x"]\n'
    )
    result = fp8doctor("model.py")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "\x1b" not in result.stderr
    assert result.stderr.endswith('\'x\'\n  File "model.py", line 3\n    x["x"]\n')


def test_an_incomplete_report_is_printed_and_written_nowhere(worker: Worker, tmp_path: Path) -> None:
    worker.facts = Facts(
        target=Target(kind="file", name="model.py", attribute=None),
        gaps={"network": "the worker was killed by SIGKILL"},
    )
    worker.problem = "the worker was killed by SIGKILL (out of memory?) while loading model.py"
    result = fp8doctor("model.py", "-o", tmp_path / "out.json", "--save", tmp_path / "saved.json")
    assert result.exit_code == 2
    assert json.loads(result.stdout)["verdict"]["status"] == "open"
    assert result.stderr.endswith(
        "fp8doctor: the worker was killed by SIGKILL (out of memory?) while loading model.py\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_mistake_of_ours_is_a_sentence_too(worker: Worker) -> None:
    worker.error = ZeroDivisionError("division by zero")
    result = fp8doctor("model.py")
    assert result.exit_code == 2
    assert "internal error, ZeroDivisionError: division by zero" in result.stderr
    assert "Traceback" not in result.stderr
    assert "Traceback" in fp8doctor("model.py", "-v").stderr


KNOWN = "RuntimeError: derivative for aten::_scaled_mm is not implemented"


@pytest.mark.slow
def test_what_is_known_of_an_error_follows_it(worker: Worker) -> None:
    worker.problem = f"model.py: its own step raises {KNOWN}"
    told = fp8doctor("model.py", "-q").stderr.splitlines()
    assert told[0] == f"fp8doctor: {worker.problem}"
    assert told[1].startswith("You are training a layer made for FP8 inference")
    assert told[1].endswith("More: fp8doctor explain MOD003")
    worker.error = UserError("model.py failed", f'  File "model.py", line 3\n{KNOWN}')
    assert fp8doctor("model.py", "-q").stderr.splitlines()[-1] == told[1]


def test_a_step_that_raises_gives_the_static_report_and_code_2(worker: Worker) -> None:
    trial = Trial(
        device="cuda",
        gpu="NVIDIA H200",
        blocks={},
        arms=(),
        reliable=False,
        why=Reason.STEP_RAISES,
        reason="its own step fails",
    )
    worker.facts = replace(DECODER_468M, trial=trial)
    result = fp8doctor("model.py", "-q")
    assert result.exit_code == 2
    assert result.stderr == "fp8doctor: its own step fails\n"
