"""The GitHub Action: its script runs as on a runner, and its defaults parse as the command line does."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from fp8doctor import cli
from fp8doctor.cli.pages import DEMO
from tests.waiting import LONGEST_S

ROOT = Path(__file__).parents[1]
ACTION = yaml.safe_load((ROOT / "action.yml").read_text("utf-8"))
WORKFLOW = yaml.safe_load((ROOT / "examples/github-workflow.yml").read_text("utf-8"))
STEPS = {step["name"]: step for step in ACTION["runs"]["steps"]}


@pytest.fixture
def runner(tmp_path: Path) -> dict[str, str]:
    """The variables of a runner, with fp8doctor in the Python that trains."""
    files = {name: str(tmp_path / name.lower()) for name in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY")}
    return {
        **os.environ,
        **files,
        "RUNNER_TEMP": str(tmp_path),
        "TRAINS": sys.executable,
        "LC_ALL": "C.UTF-8",
    }


def checked(arguments: str, runner: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """GitHub runs bash so."""
    return subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", STEPS["Check"]["run"]],
        cwd=ROOT,
        env=runner | {"ARGS": arguments},
        capture_output=True,
        text=True,
        timeout=LONGEST_S,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize(("gate", "code"), [(" --fail-on never", 0), ("\n--min-speedup 1.05\n", 1)])
def test_the_gate_decides_and_the_summary_has_the_report(
    gate: str, code: int, runner: dict[str, str], tmp_path: Path
) -> None:
    saved = tmp_path / "with a space.json.gz"
    saved.write_bytes(Path(DEMO).read_bytes())
    done = checked(f'report "{saved}"{gate}', runner)
    assert done.returncode == code, done.stderr
    assert done.stdout.startswith("::")
    summary = Path(runner["GITHUB_STEP_SUMMARY"]).read_text("utf-8")
    assert "FP8 is 2.5x slower than BF16" in summary
    assert (Path(runner["RUNNER_TEMP"]) / "fp8.md").read_text("utf-8").strip() == summary.strip()
    told = Path(runner["GITHUB_OUTPUT"]).read_text("utf-8").splitlines()
    assert [each.partition("=")[0] for each in told] == ["verdict"]


@pytest.mark.slow
def test_a_report_that_cannot_be_read_fails_the_job(runner: dict[str, str]) -> None:
    done = checked("report no.json", runner)
    assert done.returncode == 2
    assert "no.json" in done.stderr
    assert not Path(runner["GITHUB_OUTPUT"]).exists()


def test_nothing_of_a_pull_request_is_put_into_a_script() -> None:
    """What a stranger writes reaches the shell as variables only."""
    assert all("${{" not in step["run"] for step in STEPS.values())
    assert {name for step in STEPS.values() for name in step.get("env", {})} == {
        "ARGS",
        "GH_TOKEN",
        "NUMBER",
        "TRAINS",
    }


@pytest.mark.parametrize(
    "arguments",
    [
        ACTION["inputs"]["args"]["default"],
        *(
            step["with"]["args"]
            for step in WORKFLOW["jobs"]["fp8doctor"]["steps"]
            if "args" in step.get("with", {})
        ),
    ],
)
def test_its_arguments_are_ours(arguments: str) -> None:
    parsed: dict[str, Any] = cli.main.every()[""].make_context("fp8doctor", arguments.split()).params
    assert parsed["target"] == "model.py"
    assert parsed["require_fp8"] or parsed["min_speedup"] == 1.05
