"""The gate on saved reports: its exit codes, and in ``render/golden/gates.txt`` why each is missed."""

import json
import shutil
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from click.testing import Result
from msgspec.structs import replace

from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.facts import NOT_RECORDED, Arm, Converter, Facts, Network, Observation, Target, Trial
from fp8doctor.report import Report, ReportFailed, load_report
from tests.cli.command import fp8doctor
from tests.facts_of import DECODER_468M
from tests.render.test_screens import hold
from tests.test_recorded import RECORDED

ROOT = Path(__file__).resolve().parents[1]


def timed(as_is_ms: float, spread: float = 0.0) -> Facts:
    """A job whose step takes so long, and 100 ms in BF16."""
    rounds = tuple(as_is_ms + spread * (-1) ** at for at in range(6))
    arms = (
        Arm(name="as_is", tried=True, reason=None, step_ms=as_is_ms, rounds_ms=rounds),
        Arm(name="bf16", tried=True, reason=None, step_ms=100.0, rounds_ms=(100.0,) * 6),
    )
    trial = Trial(device="cuda", gpu="NVIDIA H200", blocks={}, arms=arms, reliable=True)
    return replace(DECODER_468M, trial=trial)


NO_MODEL = Facts(target=Target(kind="file", name="model.py", attribute=None), gaps={"network": "no GPU"})


def timed_apart() -> Facts:
    """Times whose quotient, 100.0 / 95.0, is not the median of the quotients round by round, 1.06."""
    facts = timed(95.0)
    as_is, bf16 = facts.trial.arms
    arms = as_is, replace(bf16, rounds_ms=(101.0,) * 6)
    return replace(facts, trial=replace(facts.trial, arms=arms))


def on_cpu(as_is_ms: float) -> Facts:
    """The same, timed on a CPU."""
    facts = timed(as_is_ms)
    return replace(facts, trial=replace(facts.trial, device="cpu", gpu=None))


def watched_on_cpu(step_ms: float) -> Facts:
    """A script on a CPU, whose own steps took so long under ``fp8doctor run``."""
    steps = tuple(step_ms + each for each in (-1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0))
    return replace(DECODER_468M, observed=Observation(steps_ms=steps, clock="host"))


def without_fp8(**converter: Any) -> Facts:
    """A model whose layers are plain Linears, after a call of a converter if there is one."""
    plain = tuple(
        replace(each, kind="torch.nn.modules.linear.Linear", stack="torch", use="none")
        for each in DECODER_468M.network.linears
    )
    network = replace(DECODER_468M.network, linears=plain)
    training = DECODER_468M.training
    if converter:
        training = replace(training, converter=Converter(**converter))
    return replace(DECODER_468M, network=network, training=training)


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Reports of 80, 84, 90 and 90 noisy ms, of CPUs, of models without FP8, and one without a time."""
    folder = tmp_path_factory.mktemp("reports")
    jobs = {"80": timed(80.0), "84": timed(84.0), "90": timed(90.0), "noisy": timed(90.0, 12.0)}
    jobs |= {"cpu": on_cpu(80.0), "cpu90": on_cpu(90.0), "watched": watched_on_cpu(80.0)}
    jobs |= {"watched90": watched_on_cpu(90.0), "bf16": without_fp8(), "apart": timed_apart()}
    jobs |= {"filtered": without_fp8(called=True, replaced=0), "empty": NO_MODEL}
    jobs["healthy"] = replace(DECODER_468M, network=replace(DECODER_468M.network, linears=()))
    jobs["unread"] = replace(DECODER_468M, network=Network(parameters=7))
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


def why(result: Result) -> str:
    """What is said of a gate that was missed; empty where it was not."""
    told = [line for line in result.stderr.splitlines() if line.startswith("fp8doctor: exit code 1: ")]
    assert bool(told) == (result.exit_code == 1)
    assert result.exit_code in (0, 1), result.stderr
    return " ".join(line.removeprefix("fp8doctor: exit code 1: ") for line in told)


HELD: dict[str, tuple[str, ...]] = {
    "report": (
        "80.json",
        "80.json --min-speedup 1.2",
        "80.json --strict",
        "untimed.json",
        "80.json --baseline 84.json",
        "84.json --baseline 80.json",
        "noisy.json --baseline 80.json",
        "80.json --min-estimated-speedup 1.2",
        "apart.json --min-speedup 1.052",
    ),
    "report --fail-on never": (
        "untimed.json --require-fp8",
        "80.json --require-fp8",
        "cpu.json --require-fp8",
        "bf16.json",
        "filtered.json",
        "unread.json",
        "empty.json",
        "untimed.json --min-estimated-speedup 0.1",
        "watched.json --min-estimated-speedup 0.1",
        "cpu.json --min-estimated-speedup 0.1",
    ),
    "compare": (
        "80.json 90.json",
        "80.json 84.json --max-regression 6",
        "80.json 84.json --fail-on warning",
        "90.json 80.json --min-speedup 1.1",
        "watched90.json watched.json",
    ),
}
"""Gates that pass. The rounds of ``apart`` have the median 1.06; the quotient of its times is 1.053."""

MISSED: dict[str, tuple[str, ...]] = {
    "report": (
        "80.json --min-speedup 1.3",
        "untimed.json --strict",
        "untimed.json --min-speedup 1",
        "80.json --fail-on warning",
        "84.json --baseline 80.json --max-regression 4",
        "90.json --baseline 80.json",
        "untimed.json --baseline 80.json",
        "80.json --min-estimated-speedup 1.3",
        "apart.json --min-speedup 1.053",
        "cpu.json --min-speedup 1",
        "cpu.json --strict",
        "cpu.json --baseline cpu90.json",
        "watched.json --baseline 84.json",
    ),
    "report --fail-on never": (
        "bf16.json --require-fp8",
        "filtered.json --require-fp8",
        "unread.json --require-fp8",
        "empty.json --require-fp8",
        "untimed.json --min-estimated-speedup 1",
        "cpu.json --min-estimated-speedup 1",
        "bf16.json --min-estimated-speedup 0.1",
    ),
    "compare": (
        "80.json 90.json --max-regression 6",
        "80.json 90.json --min-speedup 1",
        "80.json untimed.json --strict",
        "cpu90.json cpu.json --min-speedup 1",
        "watched90.json watched.json --min-speedup 1",
        "84.json watched.json --max-regression 5",
        "90.json noisy.json --min-speedup 0.9",
        "healthy.json 80.json --fail-on warning",
    ),
}

WRONG = (
    "80.json --baseline untimed.json",
    "80.json --baseline none.json",
    "80.json --max-regression 3",
    "80.json --baseline 84.json -o 84.json",
)


def lines(table: dict[str, tuple[str, ...]]) -> list[list[str]]:
    return [[*command.split(), *args.split()] for command, each in table.items() for args in each]


@pytest.mark.slow
@pytest.mark.parametrize("args", lines(HELD), ids=" ".join)
def test_a_gate_that_is_held(args: list[str]) -> None:
    assert why(fp8doctor(*args)) == ""


@pytest.mark.slow
def test_a_gate_that_is_missed_or_cannot_be_held_says_why() -> None:
    told = []
    for code, tried in ((1, lines(MISSED)), (2, [["report", *each.split()] for each in WRONG])):
        for args in tried:
            result = fp8doctor(*args)
            assert result.exit_code == code, args
            told.append(f"$ fp8doctor {' '.join(args)}\n{result.stderr}")
    hold("gates.txt", "\n".join(told))


def another(**parts: Any) -> Facts:
    """The job of 90 ms with another GPU, model or batch, or with one of them unknown."""
    facts = timed(90.0)
    return replace(facts, **{name: replace(getattr(facts, name), **part) for name, part in parts.items()})


GATES = (
    ("report", "this.json", "--fail-on", "never", "--baseline", "80.json"),
    ("report", "this.json", "--fail-on", "never", "--baseline", "80.json", "--max-regression", "99"),
    ("compare", "80.json", "this.json", "--min-speedup", "0.1"),
    ("compare", "80.json", "this.json", "--max-regression", "99"),
    ("compare", "80.json", "this.json", "--strict"),
)


@pytest.mark.slow
@pytest.mark.parametrize("gate", GATES, ids=" ".join)
@pytest.mark.parametrize(
    ("what", "parts"),
    [
        ("GPU", {"trial": {"gpu": "NVIDIA B200"}}),
        ("model", {"network": {"parameters": 5}}),
        ("batch", {"workload": {"batch_size": 1}}),
    ],
)
def test_times_of_unlike_jobs_pass_no_gate(what: str, parts: dict[str, Any], gate: tuple[str, ...]) -> None:
    """A smaller batch would make any regression pass. The report is shown all the same."""
    Report.of(diagnose(another(**parts))).save("this.json")
    result = fp8doctor(*gate)
    assert (result.exit_code, bool(result.stdout)) == (2, True)
    (told,) = result.stderr.splitlines()
    assert f": {what} " in told


@pytest.mark.parametrize("gate", GATES[1:4], ids=" ".join)
def test_what_is_unknown_of_a_baseline_is_said_and_does_not_differ(gate: tuple[str, ...]) -> None:
    Report.of(diagnose(another(network={"parameters": NOT_RECORDED}))).save("this.json")
    result = fp8doctor(*gate)
    assert result.exit_code == 0
    (told,) = result.stderr.splitlines()
    assert "model" in told


@pytest.mark.parametrize("command", [("report", "this.json"), ("compare", "80.json", "this.json")])
def test_without_a_gate_any_two_jobs_are_compared(command: tuple[str, ...]) -> None:
    Report.of(diagnose(another(network={"parameters": 5}))).save("this.json")
    result = fp8doctor(*command)
    assert (result.exit_code, result.stderr) == (0, "")


BROKEN = {
    "emulated": "MOD002",
    "converted_by_hand": "MOD007",
    "setting_without_effect": "MOD007",
    "mxfp8_on_hopper": "GPU002",
    "static_scale": "NUM001",
    "unaligned": "SHP001",
}
"""Recorded jobs whose FP8 is emulated, does not learn or raises -> the check that says so."""


@pytest.mark.slow
@pytest.mark.parametrize("name", BROKEN)
def test_fp8_that_is_required_is_missed_by_a_finding_about_it(name: str) -> None:
    saved = RECORDED / f"h200-{name}.json.gz"
    gate = ("report", saved, "--fail-on", "never", "--require-fp8")
    assert why(fp8doctor(*gate)).endswith(f" ({BROKEN[name]}).")
    report = load_report(saved)
    report.raise_for("never")
    with pytest.raises(ReportFailed, match=BROKEN[name]):
        report.raise_for("never", require_fp8=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama_8b", "wide_head", "te_autocast", "hidden_te"])
def test_fp8_that_only_costs_time_is_fp8(name: str) -> None:
    report = load_report(RECORDED / f"h200-{name}.json.gz")
    assert report.why_not_in_fp8() == ""
    report.raise_for("never", require_fp8=True)


@pytest.mark.slow
def test_a_cpu_is_no_slower_fp8() -> None:
    """FP8 is emulated on a CPU, and as slow as that is."""
    assert diagnose(on_cpu(400.0)).verdict.status == "fp8_slower"
    assert not diagnose(on_cpu(400.0)).reaches("error")
    assert diagnose(timed(400.0)).reaches("error")


@pytest.mark.slow
def test_the_estimate_is_the_one_on_the_screen() -> None:
    told = json.loads(fp8doctor("report", "untimed.json", "--format", "json").stdout)["verdict"]
    assert told["estimated_speedup"] == diagnose(DECODER_468M).verdict.estimated_speedup > 0
    assert diagnose(timed(80.0)).verdict.estimated_speedup is None


def project(text: str, file: str = "pyproject.toml") -> None:
    Path(file).write_text(dedent(text), "utf-8")


@pytest.mark.slow
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
    assert "--max-regression allows 1.5%" in why(result)
    assert "Ignored: CMP001 (compiled by the launcher)" in result.stdout
    assert "(CMP001)" not in result.stdout
    ignoring = diagnose(timed(84.0), ignore=("CMP001",), reasons={"CMP001": "why"})
    assert Report.of(ignoring).to_dict()["ignored"]


@pytest.mark.parametrize(
    ("keys", "args", "missed"),
    [
        ("fail-on = 'never'\nrequire-fp8 = true\nmin-estimated-speedup = 1", ("bf16.json",), True),
        ("fail-on = 'never'\nrequire-fp8 = true\nmin-estimated-speedup = 1", ("80.json",), False),
        ("fail-on = 'warning'\nselect = 'CMP001'", ("80.json",), True),
        ("fail-on = 'warning'\nselect = 'CMP001'", ("80.json", "--fail-on", "never"), False),
        ("fail-on = 'warning'\nselect = 'CMP001'", ("80.json", "--select", "SHP"), False),
    ],
)
def test_the_command_line_goes_before_the_project(keys: str, args: tuple[str, ...], missed: bool) -> None:
    project(f"[tool.fp8doctor]\n{keys}\n")
    assert bool(why(fp8doctor("report", *args))) == missed


def test_the_nearest_project_above_the_target_holds(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = folder / "pkg" / "models"
    deep.mkdir(parents=True)
    project("[tool.fp8doctor]\nfail-on = 'never'\n")
    project("[tool.other]\nname = 'fp8doctor'\n", "pkg/pyproject.toml")
    monkeypatch.chdir(deep)
    assert why(fp8doctor("report", "../../80.json")) == ""
    project("[tool.fp8doctor]\nfail-on = 'warning'\n", "../pyproject.toml")
    assert why(fp8doctor("report", "../../80.json"))


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
        ("fail_on = 'error'", "; did you mean fail-on?"),
        ("nonsense = 1", "has no key 'nonsense'; its keys are select, ignore"),
        ("fail-on = 'grave'", "fail-on: 'grave' is not one of"),
        ("fail-on = 3", "fail-on: '3' is not one of"),
        ("min-speedup = true", "min-speedup: 'True' is not a valid"),
        ("min-speedup = -1", "min-speedup: -1.0 is not a positive number"),
        ("select = [1]", "no check has a code that begins with '1'"),
        ("assume-gpu = 'H999'", "H999"),
        ("ignore = ['CMP001']", "CODE needs a reason"),
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
