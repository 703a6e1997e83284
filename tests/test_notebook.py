"""Reports where they show themselves: in a notebook, at a prompt, while they are made."""

import ast
import builtins
import gzip
import io
import json
import sys
import threading
import unicodedata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from torch import nn

import fp8doctor
import fp8doctor.trial
from fp8doctor import inspect_model, load_report
from fp8doctor.report import Prescription, Report, Shown
from fp8doctor.stages import Doing, Stage, progress_line, someone_watches
from tests.configurations import LLAMA_8B
from tests.render.sound_html import hold_sound
from tests.render.test_html import DEMO

RECORDED_HEALTH = Path(__file__).parent / "health" / "recorded"
NOTEBOOK = Path(__file__).parents[1] / "examples" / "notebook.ipynb"


@pytest.fixture(scope="module")
def demo() -> Report:
    return load_report(DEMO)


def shown(cell: str, names: dict[str, Any]) -> Any:
    """What a cell shows: its last expression, as a notebook's kernel finds it."""
    tree = ast.parse(cell)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "cell", "exec"), names)
    return eval(compile(ast.Expression(last.value), "cell", "eval"), names) if last else None


@pytest.mark.slow
def test_the_example_runs_and_shows_what_it_says() -> None:
    cells = [each for each in json.loads(NOTEBOOK.read_text("utf-8"))["cells"] if each["cell_type"] == "code"]
    assert all(each["outputs"] == [] and each["execution_count"] is None for each in cells)
    names: dict[str, Any] = {"__name__": "notebook"}
    out = [shown("".join(each["source"]), names) for each in cells]
    before, findings, prescription, after, timed, won = out[2:]
    for result in (before, after, timed):
        hold_sound(result._repr_html_())
    assert "CMP001" in repr(findings)
    assert "compile" in repr(prescription)
    assert (before.verdict.status, after.verdict.status) == ("fp8_slower", "fp8_faster")
    assert after.verdict.best_step_ms == pytest.approx(before.verdict.best_step_ms, rel=0.01)
    assert (timed.verdict.status, timed.verdict.basis) == ("fp8_slower", "measured")
    assert "1.22x faster" in won


class ZMQInteractiveShell:
    """Named like the shell of Jupyter's kernel, by which rich knows a notebook."""


@pytest.mark.slow
def test_printed_in_a_cell_it_is_the_plain_text(demo: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = str(demo)
    monkeypatch.setattr(builtins, "get_ipython", ZMQInteractiveShell, raising=False)
    assert Console().is_jupyter
    assert str(demo) == plain
    assert not [each for each in plain if unicodedata.category(each) == "Co"]


def test_what_follows_can_be_typed_where_it_is_printed(demo: Report) -> None:
    following = str(demo).partition("Next")[2]
    assert following.split("·")[0].strip() == 'report.save("report.json")'
    assert "in a shell: fp8doctor report -v report.json" in following
    assert "-o report.html" not in following


@pytest.fixture(scope="module")
def results(demo: Report, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Shown]:
    """All that a call of fp8doctor returns."""
    health = tmp_path_factory.mktemp("health") / "health.jsonl"
    health.write_bytes(gzip.decompress((RECORDED_HEALTH / "h100-poisoned_history.jsonl.gz").read_bytes()))
    return {
        "Report": demo,
        "Plan": fp8doctor.plan(LLAMA_8B, "H100", seq=4096, lora=16),
        "Comparison": fp8doctor.compare(demo, DEMO),
        "Health": fp8doctor.load_health(health),
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Report", "Plan", "Comparison", "Health"])
def test_what_is_returned_shows_itself(kind: str, results: dict[str, Shown], tmp_path: Path) -> None:
    """A line at a prompt, the command line's page where it is printed, and HTML in a notebook."""
    result = results[kind]
    assert repr(result).startswith(f"<{kind}: ")
    assert len(repr(result).splitlines()) == 1
    assert len(repr(result)) < 600
    assert result.to_text(80).splitlines()[0].startswith("fp8doctor ")
    hold_sound(result._repr_html_())
    hold_sound(result.to_html())
    assert result.to_markdown().startswith("## fp8doctor ")
    result.save(tmp_path / "saved.json")
    assert json.loads((tmp_path / "saved.json").read_bytes())["schema_version"]


def test_what_a_prompt_shows_of_a_finding_and_of_the_plan(demo: Report) -> None:
    assert repr(demo.findings[0]).startswith("<CMP001 warning eager-float8: ")
    assert repr(demo.prescription).startswith("1. <CMP001 compile-blocks: ")
    assert repr(Prescription()) == "<Prescription: nothing to change>"


class Terminal(io.StringIO):
    """A terminal that keeps what it was shown."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("progress", "told"), [(True, True), (False, False)])
def test_a_terminal_sees_what_is_done(progress: bool, told: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def timed(job: Any, facts: Any, *rest: Any) -> Any:
        rest[-1](Doing("timing BF16"), None)
        return facts

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(fp8doctor.trial, "time_copies", timed)
    before = set(threading.enumerate())
    inspect_model(nn.Sequential(nn.Linear(16, 16)), progress=progress)
    assert ("timing BF16" in terminal.getvalue()) is told
    assert set(threading.enumerate()) == before


def test_a_log_sees_nothing_and_a_cell_of_a_notebook_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    for stderr in (None, io.StringIO()):
        monkeypatch.setattr(sys, "stderr", stderr)
        assert not someone_watches()
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=ZMQInteractiveShell))
    assert someone_watches()


def test_the_line_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with progress_line() as tell:
        tell(Doing("building BF16", Stage.BUILDING))
        tell(Doing("timing 3 variants of the step", Stage.TIMING, left_s=60.0))
    assert "timing 3 variants of the step · 0 s of about 60 s" in terminal.getvalue()
    assert terminal.getvalue().split("\r")[-1].strip() == ""
