"""The command that looks at the job again is the one that the user typed, and no file holds its arguments."""

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from fp8doctor import load_report
from fp8doctor.answer.open_questions import run_again
from fp8doctor.cli import run as command
from fp8doctor.facts import Target
from fp8doctor.running.script_messages import ScriptState, WatchOptions
from tests.cli.command import Worker, fp8doctor

ROOT = Path(__file__).resolve().parents[2]
WATCHED = load_report(ROOT / "tests" / "running" / "recorded" / "h200-fsdp2.json.gz").facts
SECRET = f"hf_{'a1' * 17}"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("train.py", "it's.py"):
        Path(name).touch()
    return tmp_path


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Report the facts of a script that was recorded, in place of running one."""

    def ended(script: Any, settings: WatchOptions, *, report: Callable[[ScriptState], int], **_: Any) -> int:
        target = Target(kind="script", name=settings.script, attribute=None, module=settings.module)
        facts = replace(WATCHED, target=target)
        return report(ScriptState(facts, complete=True, ended=True))

    monkeypatch.setattr(command, "run_script", ended)


def told(stdout: str) -> list[str]:
    """The commands that run and examine something, out of a screen without its box and its lines' ends."""
    text = " ".join(line.strip("│ ") for line in stdout.splitlines() if "─" not in line)
    return [f"fp8doctor {each}" for each in text.split("fp8doctor ")[1:] if not each.startswith(("0", "exp"))]


@pytest.mark.parametrize(
    ("typed", "again"),
    [
        ("run train.py", "run --stop train.py"),
        ("run train.py x.py --device=cpu -o out", "run --stop train.py x.py --device=cpu -o out"),
        ("run -m litgpt pretrain --data 'Text Files'", "run --stop -m litgpt pretrain --data 'Text Files'"),
        ("run --steps 4 --no-trial train.py --no-trial", "run --stop --steps 4 train.py --no-trial"),
        ("--steps=4 run --device cpu train.py", "run --stop --steps=4 train.py"),
        ("run --device cuda:1 --stop train.py run", "run --stop --device cuda:1 train.py run"),
        ("run --every 9 --health=a --stop-on-nan train.py", "run --stop train.py"),
        ("run \"it's.py\" '$HOME' 'a;b'", "run --stop 'it'\"'\"'s.py' '$HOME' 'a;b'"),
    ],
)
def test_a_script_is_run_again_with_its_arguments(typed: str, again: str, here: Path, watched: None) -> None:
    screen = fp8doctor(*shlex.split(typed)).stdout
    (timed,) = told(screen)
    assert timed.startswith(f"fp8doctor {again} ")


def test_a_long_command_stands_whole_on_a_line_of_its_own(here: Path, watched: None) -> None:
    words = [f"--option{each}=value" for each in range(20)]
    screen = fp8doctor("run", "train.py", *words).stdout
    assert f"      fp8doctor run --stop train.py {' '.join(words)}\n" in screen


def test_arguments_are_printed_and_not_saved(here: Path, watched: None) -> None:
    files = ("a.json", "b.html", "c.md", "d.txt", "e.xml", "f.github")
    outputs = [word for file in files for word in ("-o", file)]
    result = fp8doctor("run", *outputs, "--save", "h.json", "-m", "pkg.train", "--mine", "--token", SECRET)
    assert result.stdout == ""
    for file in (*files, "h.json"):
        assert "--mine" not in Path(file).read_text("utf-8")
    assert json.loads(Path("h.json").read_text("utf-8"))["next"] == {
        "command": "fp8doctor run --stop -m pkg.train ARGS...",
        "saving_ms": None,
        "verify": "fp8doctor run -m pkg.train ARGS...",
    }
    assert "fp8doctor run --stop -m pkg.train ARGS..." in " ".join(
        fp8doctor("report", "h.json").stdout.split()
    )
    printed = fp8doctor("run", "train.py", "--mine", "--token", SECRET).stdout
    assert "--mine --token <secret>" in " ".join(line.strip("│ ") for line in printed.splitlines())
    assert SECRET not in printed


@pytest.mark.parametrize(
    ("typed", "again"),
    [
        ("model.py --batch 4 --seq 512", "model.py --batch 4 --seq 512"),
        ("--no-trial sub/model.py:Net", "sub/model.py:Net"),
        ("pkg.model:attr --device cpu --budget 90", "pkg.model:attr --budget 90"),
        ("'my model.py' --device=cuda:1", "'my model.py' --device cuda:1"),
    ],
)
def test_a_model_is_examined_again_with_its_options(
    typed: str, again: str, here: Path, worker: Worker
) -> None:
    target = Target(kind="file", name="model.py", attribute=None)
    worker.facts = replace(WATCHED, target=target)
    commands = told(fp8doctor(*shlex.split(typed)).stdout)
    assert commands
    assert all(each.startswith(f"fp8doctor {again} ") for each in commands)


@pytest.mark.parametrize(
    ("variables", "launcher"),
    [
        ({}, ""),
        ({"ACCELERATE_MIXED_PRECISION": "fp8"}, ""),  # exported by hand
        (
            dict.fromkeys(("ACCELERATE_MIXED_PRECISION", "ACCELERATE_DYNAMO_MODE"), "x"),
            "accelerate launch ... -m ",
        ),
    ],
)
def test_a_launcher_is_named_by_what_it_sets(variables: dict[str, str], launcher: str) -> None:
    """Without it the job would be another: its precision is an option of the launcher."""
    environment = replace(WATCHED.environment, variables=variables)
    again = run_again(replace(WATCHED, environment=environment))
    assert again == f"{launcher}fp8doctor run fsdp2.py ARGS..."
