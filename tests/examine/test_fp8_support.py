"""Try FP8 backends, broken packages in a real process."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from fp8doctor.examine import environment
from fp8doctor.examine.environment import try_backends
from fp8doctor.facts.record import NOT_RECORDED

Install = Callable[[str], None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Install:
    """Puts a Transformer Engine first on ``sys.path``; beside it an empty torch, so that the process of its
    own starts at once."""
    (tmp_path / "torch.py").touch()
    monkeypatch.syspath_prepend(tmp_path)

    def write(code: str) -> None:
        inner = tmp_path / "transformer_engine" / "pytorch"
        inner.mkdir(parents=True)
        (inner.parent / "__init__.py").touch()
        (inner / "__init__.py").write_text(code)

    return write


def tried(**variables: str) -> dict[str, str | None]:
    gaps: dict[str, str] = {}
    found = try_backends(variables, gaps)
    assert gaps == {}
    return found


def test_nothing_is_tried_where_nothing_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, forget_accelerate: None
) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("a process was started"))
    misspelled = {"ACCELERATE_MIXED_PRECISION": "fp8", "ACCELERATE_FP8_BACKEND": "te"}
    assert tried() == tried(ACCELERATE_MIXED_PRECISION="bf16") == tried(**misspelled) == {}


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("", None),
        ("print('fp8doctor is a word that libraries may print')", None),
        ("raise OSError('two\\nlines')", "OSError: two lines"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("import os; os.abort()", "the process that imported it ended with code -6"),
        (
            "raise ImportError('/home/somebody/te.so: hf_abcdefghijklmnopqrstuvwxyz01234567')",
            "ImportError: ~/te.so: <secret>",
        ),
    ],
)
def test_the_real_reason_comes_out(install: Install, code: str, error: str | None) -> None:
    install(code)
    assert tried(ACCELERATE_FP8_BACKEND="TE") == {"TE": error}


def test_a_try_that_does_not_end_is_a_gap(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install("import time; time.sleep(60)")
    monkeypatch.setattr(environment, "TIME_LIMIT_S", 0.5)
    gaps: dict[str, str] = {}
    assert try_backends({"ACCELERATE_FP8_BACKEND": "TE"}, gaps) is NOT_RECORDED
    assert "0.5 s" in gaps["environment.backend_imports"]
