"""``fp8doctor fix``: what it shows, when it writes, and when it refuses."""

import json
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from fp8doctor import load_report
from fp8doctor.cli import fix as command
from fp8doctor.diagnosis.document import Document
from fp8doctor.errors import UserError
from fp8doctor.files import digest
from fp8doctor.report import Report
from tests.cli.command import fp8doctor, process

ROOT = Path(__file__).resolve().parents[2]
RECORDED = ROOT / "tests/running/recorded"
EAGER, COMPILED = RECORDED / "h200-lora_eager.json.gz", RECORDED / "h200-lora.json.gz"

SCRIPT = """import torch
from peft import get_peft_model

model = get_peft_model(build(), lora)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
"""
COMPILES = """for block in model.base_model.model.model.layers:
    block.compile()
"""
FIXED = SCRIPT.replace("optimizer =", f"{COMPILES}optimizer =")


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "lora.py"
    path.write_text(SCRIPT)
    return path


def report_of(script: Path, recorded: Path = EAGER) -> Path:
    """Save a recorded report as one of this script."""
    report = load_report(recorded)
    target = replace(report.facts.target, name=script.name, digest=digest(script.read_bytes()))
    path = script.with_name("report.json")
    Report.of(replace(report, facts=replace(report.facts, target=target))).save(path)
    return path


Runs = Callable[..., None]


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    """Answer the runs of a script with recorded reports, or with an error."""

    def answer(*results: Path | UserError) -> None:
        left: Iterator[Path | UserError] = iter(results)

        def watched(script: Path, arguments: Any, *options: str, of: str = "") -> Document:
            result = next(left)
            if of:
                assert script.read_text() == FIXED
            if isinstance(result, UserError):
                raise result
            return load_report(result)

        monkeypatch.setattr(command, "_watched", watched)

    return answer


def test_the_diff_is_shown_and_nothing_is_changed(script: Path) -> None:
    shown = fp8doctor("fix", script, "--report", report_of(script))
    assert shown.exit_code == 0, shown.output
    assert "Fix 1 (CMP001)" in shown.stdout
    assert "in the diff below" in shown.stdout
    assert "+for block in model.base_model.model.model.layers:\n+    block.compile()\n" in shown.stdout
    assert script.read_text() == SCRIPT
    assert sorted(each.name for each in script.parent.iterdir()) == ["lora.py", "report.json"]


@pytest.mark.parametrize("end", ["\n", "", "\n# é\n"])
def test_the_output_is_a_patch_that_git_applies(
    script: Path, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    script.write_text(SCRIPT.rstrip("\n") + end)
    monkeypatch.chdir(script.parent)
    shown = fp8doctor("fix", script.name, "--report", report_of(script))
    subprocess.run(["git", "apply", "-"], input=shown.stdout_bytes, check=True, cwd=script.parent, timeout=60)
    assert script.read_text() == FIXED.rstrip("\n") + end


def test_fixes_that_help_are_written_next_to_a_copy(script: Path, runs: Runs) -> None:
    script.chmod(0o755)
    runs(EAGER, COMPILED)
    applied = fp8doctor("fix", script, "--report", report_of(script), "--apply")
    assert applied.exit_code == 0, applied.output
    assert script.read_text() == FIXED
    assert script.with_name("lora.py.orig").read_text() == SCRIPT
    assert script.stat().st_mode & 0o777 == 0o755
    assert sorted(each.name for each in script.parent.iterdir()) == ["lora.py", "lora.py.orig", "report.json"]


@pytest.mark.parametrize(
    ("results", "code", "why"),
    [
        ((COMPILED, EAGER), 1, "not faster beyond noise"),
        ((EAGER, EAGER), 1, "not faster beyond noise"),
        ((EAGER, UserError("lora.py with the fixes gave no report")), 1, "gave no report"),
        ((UserError("lora.py gave no report"),), 2, "gave no report"),
        ((RECORDED.parents[1] / "reports_without_times.json",), 2, "cannot read"),
    ],
)
def test_a_script_whose_fixes_do_not_help_stays_as_it_is(
    script: Path, runs: Runs, results: tuple[Path | UserError, ...], code: int, why: str
) -> None:
    runs(*results)
    applied = fp8doctor("fix", script, "--report", report_of(script), "--apply")
    assert applied.exit_code == code
    assert why in applied.stderr
    assert script.read_text() == SCRIPT
    assert sorted(each.name for each in script.parent.iterdir()) == ["lora.py", "report.json"]


@pytest.mark.parametrize("edited", ["the script", "its copy"])
def test_an_edit_made_while_the_script_runs_is_kept(
    script: Path, runs: Runs, monkeypatch: pytest.MonkeyPatch, edited: str
) -> None:
    mine = script if edited == "the script" else script.with_name("lora.py.orig")
    runs(report_of(script), EAGER, COMPILED)
    run = command._watched

    def editing(*arguments: Any, **options: Any) -> Document:
        mine.write_text("an hour of work")
        return run(*arguments, **options)

    monkeypatch.setattr(command, "_watched", editing)
    applied = fp8doctor("fix", script, "--apply")
    assert applied.exit_code == 2
    assert mine.name in applied.stderr.splitlines()[-1]
    assert mine.read_text() == "an hour of work"
    assert {SCRIPT, "an hour of work"} >= {each.read_text() for each in script.parent.glob("lora.py*")}


@pytest.mark.parametrize(
    ("prepare", "why"),
    [
        (lambda script: script.write_text(f"{SCRIPT}# more\n"), "lora.py has changed since the report"),
        (lambda script: script.write_text("def f(:\n"), "invalid syntax (lora.py, line 1)"),
        (lambda script: script.chmod(0o444), "lora.py: it is read-only"),
        (lambda script: script.with_name("lora.py.orig").write_text("mine"), "lora.py.orig exists"),
        (Path.unlink, "No such file"),
    ],
)
def test_it_refuses(script: Path, prepare: Callable[[Path], Any], why: str) -> None:
    report = report_of(script)
    prepare(script)
    before = {path: path.read_text() for path in script.parent.iterdir()}
    refused = fp8doctor("fix", script, "--report", report, "--apply")
    assert refused.exit_code == 2
    assert why in refused.stderr
    assert {path: path.read_text() for path in script.parent.iterdir()} == before


def test_a_model_file_is_not_said_to_have_changed(script: Path) -> None:
    report = report_of(script)
    saved = json.loads(report.read_text())
    saved["facts"]["target"] |= {"kind": "file", "digest": None}
    report.write_text(json.dumps(saved))
    refused = fp8doctor("fix", script, "--report", report)
    assert refused.exit_code == 2
    assert "changed since" not in refused.stderr
    assert script.read_text() == SCRIPT


@pytest.mark.slow
def test_a_script_that_runs_here(tmp_path: Path) -> None:
    """Without a GPU nothing is written unless asked; what is written then compiles the blocks."""
    script, saved = tmp_path / "lora.py", tmp_path / "after.json"
    text = (ROOT / "examples/lora.py").read_text()
    text = re.sub(r"    if not arguments\.no_compile:\n.*\n.*\n", "", text)
    script.write_text(text)
    report = report_of(script)
    applied = process("fix", "lora.py", "--report", report, "--apply", "--", "--hidden", "32", cwd=tmp_path)
    assert applied.returncode == 2
    assert "the fixes cannot be timed (there is no GPU here)" in applied.stderr
    assert script.read_text() == text
    assert sorted(each.name for each in tmp_path.iterdir()) == ["lora.py", "report.json"]
    shown = process("fix", "lora.py", "--report", report, cwd=tmp_path).stdout
    subprocess.run(["git", "apply", "-"], input=shown, text=True, check=True, cwd=tmp_path, timeout=60)
    process("run", "--stop", "-q", "--save", saved, "lora.py", cwd=tmp_path)
    after = json.loads(saved.read_text())
    assert after["facts"]["target"]["digest"] == digest(script.read_bytes())
    assert "CMP001" not in [each["code"] for each in after["findings"]]
