"""The gate, on saved reports: what is missed is said in one line, and is exit code 1."""

from __future__ import annotations

import shutil
from pathlib import Path
from textwrap import dedent

import msgspec
import pytest
from click.testing import CliRunner, Result

from fp8doctor import cli
from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.facts import Arm, Facts, Trial
from fp8doctor.report import Report
from tests.facts_of import DECODER_468M

ROOT = Path(__file__).resolve().parents[1]


def timed(as_is_ms: float, spread: float = 0.0) -> Facts:
    """A job whose step takes so long, and 100 ms in BF16."""
    rounds = tuple(as_is_ms + spread * (-1) ** at for at in range(6))
    arms = (
        Arm(name="as_is", tried=True, reason=None, step_ms=as_is_ms, rounds_ms=rounds),
        Arm(name="bf16", tried=True, reason=None, step_ms=100.0, rounds_ms=(100.0,) * 6),
    )
    trial = Trial(device="cuda", gpu="NVIDIA H200", blocks={}, arms=arms, reliable=True)
    return msgspec.structs.replace(DECODER_468M, trial=trial)


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Reports of 80, 84, 90 and 90 noisy ms, and one without a time."""
    folder = tmp_path_factory.mktemp("reports")
    jobs = {"80": timed(80.0), "84": timed(84.0), "90": timed(90.0), "noisy": timed(90.0, 12.0)}
    for name, facts in {**jobs, "untimed": DECODER_468M}.items():
        Report.of(diagnose(facts)).save(folder / f"{name}.json")
    return folder


@pytest.fixture(autouse=True)
def folder(reports: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with copies of these reports, which is the current one."""
    monkeypatch.chdir(tmp_path)
    for file in reports.iterdir():
        shutil.copy(file, tmp_path)
    return tmp_path


def fp8doctor(*args: str | Path) -> Result:
    return CliRunner().invoke(cli.main, [str(arg) for arg in args])


def why(result: Result) -> str:
    """The line that says why the gate was missed; empty where it was not."""
    told = [line for line in result.stderr.splitlines() if line.startswith("fp8doctor: exit 1: ")]
    assert len(told) == (result.exit_code == 1)
    assert result.exit_code in (0, 1), result.stderr
    return told[0].removeprefix("fp8doctor: exit 1: ") if told else ""


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("80.json",), ""),
        (("80.json", "--min-speedup", "1.2"), ""),
        (
            ("80.json", "--min-speedup", "1.3"),
            "FP8 is measured at 1.25x of the best BF16 (--min-speedup 1.3)",
        ),
        (("80.json", "--strict"), ""),
        (("untimed.json",), ""),
        (("untimed.json", "--strict"), "nothing was measured (--strict)"),
        (("untimed.json", "--min-speedup", "1"), "nothing was measured (--min-speedup 1)"),
        (("80.json", "--fail-on", "warning"), "found CMP001 (--fail-on warning)"),
        (("80.json", "--baseline", "84.json"), ""),
        (("84.json", "--baseline", "80.json"), ""),
        (
            ("84.json", "--baseline", "80.json", "--max-regression", "4"),
            "the step takes 84.0 ms, 5.0 % more than the 80.0 ms of 80.json (--max-regression 4)",
        ),
        (
            ("90.json", "--baseline", "80.json"),
            "the step takes 90.0 ms, 12.5 % more than the 80.0 ms of 80.json (--max-regression 5)",
        ),
        (("noisy.json", "--baseline", "80.json"), ""),
        (
            ("untimed.json", "--baseline", "80.json"),
            "no step was timed to be held against 80.json: nothing was timed (--max-regression 5)",
        ),
    ],
)
def test_a_report_is_held_to_the_gate(args: tuple[str, ...], said: str) -> None:
    assert why(fp8doctor("report", *args)) == said


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("80.json", "90.json"), ""),
        (("80.json", "84.json", "--max-regression", "6"), ""),
        (
            ("80.json", "90.json", "--max-regression", "6"),
            "the step takes 90.0 ms, 12.5 % more than the 80.0 ms of 80.json (--max-regression 6)",
        ),
        (
            ("80.json", "90.json", "--min-speedup", "1"),
            "the second's speed is 0.89x of the first's (--min-speedup 1)",
        ),
        (("80.json", "untimed.json", "--strict"), "there are not two measured steps (--strict)"),
    ],
)
def test_two_reports_are_held_to_the_gate(args: tuple[str, ...], said: str) -> None:
    assert why(fp8doctor("compare", *args)) == said


def test_only_what_the_second_report_adds_fails_a_comparison(folder: Path) -> None:
    healthy = msgspec.structs.replace(
        DECODER_468M, network=msgspec.structs.replace(DECODER_468M.network, linears=())
    )
    Report.of(diagnose(healthy)).save(folder / "healthy.json")
    assert why(fp8doctor("compare", "80.json", "84.json", "--fail-on", "warning")) == ""
    told = why(fp8doctor("compare", "healthy.json", "80.json", "--fail-on", "warning"))
    assert told.startswith("only the second has CMP001")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (
            ("80.json", "--baseline", "untimed.json"),
            "untimed.json is no baseline, it holds no time of a step",
        ),
        (("80.json", "--baseline", "none.json"), "cannot read none.json"),
        (("80.json", "--max-regression", "3"), "--max-regression needs --baseline"),
        (("80.json", "--baseline", "84.json", "-o", "84.json"), "would overwrite 84.json"),
    ],
)
def test_a_gate_that_cannot_be_held_is_wrong_usage(args: tuple[str, ...], said: str) -> None:
    result = fp8doctor("report", *args)
    assert result.exit_code == 2
    assert said in result.stderr


def project(text: str, file: str = "pyproject.toml") -> None:
    Path(file).write_text(dedent(text), "utf-8")


def test_a_project_holds_its_own_gates() -> None:
    project(
        """
        [tool.fp8doctor]
        fail-on = "warning"
        baseline = "80.json"
        max-regression = 1.5

        [tool.fp8doctor.ignore]
        cmp001 = "compiled by the launcher"
        """
    )
    result = fp8doctor("report", "84.json")
    assert (
        why(result) == "the step takes 84.0 ms, 5.0 % more than the 80.0 ms of 80.json (--max-regression 1.5)"
    )
    assert "Ignored: CMP001 (compiled by the launcher)" in result.stdout
    assert "(CMP001)" not in result.stdout
    assert Report.of(diagnose(timed(84.0), ignore=("CMP001",), reasons={"CMP001": "why"})).to_dict()[
        "ignored"
    ]
    assert "Ignored: CMP001" in fp8doctor("report", "84.json", "--format", "markdown").stdout


def test_the_command_line_goes_before_the_project() -> None:
    project("[tool.fp8doctor]\nfail-on = 'warning'\nselect = 'CMP001'\n")
    assert why(fp8doctor("report", "80.json")) == "found CMP001 (--fail-on warning)"
    assert why(fp8doctor("report", "80.json", "--fail-on", "never")) == ""
    assert why(fp8doctor("report", "80.json", "--select", "SHP")) == ""


def test_the_nearest_project_above_the_target_holds(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = folder / "pkg" / "models"
    deep.mkdir(parents=True)
    project("[tool.fp8doctor]\nfail-on = 'never'\n")
    project("[tool.other]\nname = 'fp8doctor'\n", "pkg/pyproject.toml")
    monkeypatch.chdir(deep)
    assert why(fp8doctor("report", "../../80.json")) == ""
    project("[tool.fp8doctor]\nfail-on = 'warning'\n", "../pyproject.toml")
    assert why(fp8doctor("report", "../../80.json")) == "found CMP001 (--fail-on warning)"


def test_a_target_with_a_name_that_no_file_has_is_a_sentence(folder: Path) -> None:
    done = fp8doctor("x" * 5000)
    assert done.exit_code == 2
    assert "internal error" not in done.stderr


def test_the_project_of_a_target_is_that_of_its_folder(folder: Path) -> None:
    (folder / "pkg").mkdir()
    project("[tool.fp8doctor]\nbadkey = 1\n", "pkg/pyproject.toml")
    (folder / "pkg" / "model.py").write_text("model = None\n")
    for target in ("pkg/model.py", "pkg/model.py:model"):
        assert "has no key 'badkey'" in fp8doctor(target).stderr
    assert "has no key" not in fp8doctor("report", "80.json").stderr


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("fail_on = 'error'", "has no key 'fail_on' (there is fail-on)"),
        ("nonsense = 1", "has no key 'nonsense'; its keys are select, ignore"),
        ("fail-on = 'grave'", "fail-on: 'grave' is not one of"),
        ("fail-on = 3", "fail-on is a text, not 3"),
        ("min-speedup = true", "min-speedup is a number, not True"),
        ("min-speedup = -1", "min-speedup: -1.0 is not a positive number"),
        ("select = [1]", "select is a list of texts"),
        ("assume-gpu = 'H999'", "H999"),
        ("ignore = ['CMP001']", "ignore is a table, not ['CMP001']"),
        ("ignore = {CMP001 = ''}", "CMP001 needs a reason"),
        ("ignore = {ZZZ = 'why'}", "no check has a code that begins with 'ZZZ'"),
        ("baseline = 'gone.json'", "cannot read"),
        ("= 3", "cannot read"),
    ],
)
def test_a_mistake_in_the_project_is_a_sentence(text: str, said: str) -> None:
    project(f"[tool.fp8doctor]\n{text}\n")
    result = fp8doctor("report", "80.json")
    assert result.exit_code == 2
    assert said in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
