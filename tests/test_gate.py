"""The gate, on saved reports: what is missed is said in one line, and is exit code 1."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from textwrap import dedent
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result

from fp8doctor import cli
from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.facts import NOT_RECORDED, Arm, Converter, Facts, Network, Observation, Target, Trial
from fp8doctor.report import Report, ReportFailed, load_report
from tests.facts_of import DECODER_468M
from tests.test_recorded import RECORDED

ROOT = Path(__file__).resolve().parents[1]
FOUND = "Found CMP001 with --fail-on warning. Use --fail-on never to ignore findings."


def timed(as_is_ms: float, spread: float = 0.0) -> Facts:
    """A job whose step takes so long, and 100 ms in BF16."""
    rounds = tuple(as_is_ms + spread * (-1) ** at for at in range(6))
    arms = (
        Arm(name="as_is", tried=True, reason=None, step_ms=as_is_ms, rounds_ms=rounds),
        Arm(name="bf16", tried=True, reason=None, step_ms=100.0, rounds_ms=(100.0,) * 6),
    )
    trial = Trial(device="cuda", gpu="NVIDIA H200", blocks={}, arms=arms, reliable=True)
    return msgspec.structs.replace(DECODER_468M, trial=trial)


NO_MODEL = Facts(target=Target(kind="file", name="model.py", attribute=None), gaps={"network": "no GPU"})


def timed_apart() -> Facts:
    """Times whose quotient, 100.0 / 95.0, is not the median of the quotients round by round, 1.06."""
    facts = timed(95.0)
    as_is, bf16 = facts.trial.arms
    arms = as_is, msgspec.structs.replace(bf16, rounds_ms=(101.0,) * 6)
    return msgspec.structs.replace(facts, trial=msgspec.structs.replace(facts.trial, arms=arms))


def on_cpu(as_is_ms: float) -> Facts:
    """The same, timed on a CPU."""
    facts = timed(as_is_ms)
    return msgspec.structs.replace(facts, trial=msgspec.structs.replace(facts.trial, device="cpu", gpu=None))


def watched_on_cpu(step_ms: float) -> Facts:
    """A script on a CPU, whose own steps took so long under ``fp8doctor run``."""
    steps = tuple(step_ms + each for each in (-1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0))
    return msgspec.structs.replace(DECODER_468M, observed=Observation(steps_ms=steps, clock="host"))


def without_fp8(**converter: Any) -> Facts:
    """A model whose layers are plain Linears, after a call of a converter if there is one."""
    plain = tuple(
        msgspec.structs.replace(each, kind="torch.nn.modules.linear.Linear", stack="torch", use="none")
        for each in DECODER_468M.network.linears
    )
    network = msgspec.structs.replace(DECODER_468M.network, linears=plain)
    training = DECODER_468M.training
    if converter:
        training = msgspec.structs.replace(training, converter=Converter(**converter))
    return msgspec.structs.replace(DECODER_468M, network=network, training=training)


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Reports of 80, 84, 90 and 90 noisy ms, of CPUs, of models without FP8, and one without a time."""
    folder = tmp_path_factory.mktemp("reports")
    jobs = {"80": timed(80.0), "84": timed(84.0), "90": timed(90.0), "noisy": timed(90.0, 12.0)}
    jobs |= {"cpu": on_cpu(80.0), "cpu90": on_cpu(90.0), "watched": watched_on_cpu(80.0)}
    jobs |= {"watched90": watched_on_cpu(90.0), "bf16": without_fp8(), "apart": timed_apart()}
    jobs |= {"filtered": without_fp8(named=True, called=True, replaced=0), "empty": NO_MODEL}
    jobs["unread"] = msgspec.structs.replace(DECODER_468M, network=Network(parameters=7))
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
    """The lines that say why the gate was missed; empty where it was not."""
    told = [line for line in result.stderr.splitlines() if line.startswith("fp8doctor: exit code 1: ")]
    assert bool(told) == (result.exit_code == 1)
    assert result.exit_code in (0, 1), result.stderr
    return " ".join(line.removeprefix("fp8doctor: exit code 1: ") for line in told)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("80.json",), ""),
        (("80.json", "--min-speedup", "1.2"), ""),
        (
            ("80.json", "--min-speedup", "1.3"),
            "FP8 runs at 1.25x of the best BF16, measured. --min-speedup asks for 1.3x.",
        ),
        (("80.json", "--strict"), ""),
        (("untimed.json",), ""),
        (("untimed.json", "--strict"), "No step was timed. --strict needs a step timed on a GPU."),
        (
            ("untimed.json", "--min-speedup", "1"),
            "No step was timed. --min-speedup 1 needs a step timed on a GPU.",
        ),
        (("80.json", "--fail-on", "warning"), FOUND),
        (("80.json", "--baseline", "84.json"), ""),
        (("84.json", "--baseline", "80.json"), ""),
        (
            ("84.json", "--baseline", "80.json", "--max-regression", "4"),
            "The step takes 84.0 ms, 5.0% more than the 80.0 ms of 80.json. --max-regression allows 4%.",
        ),
        (
            ("90.json", "--baseline", "80.json"),
            "The step takes 90.0 ms, 12.5% more than the 80.0 ms of 80.json. --max-regression allows 5%.",
        ),
        (("noisy.json", "--baseline", "80.json"), ""),
        (
            ("untimed.json", "--baseline", "80.json"),
            "No step was timed to compare with 80.json: nothing was timed. --max-regression allows 5%.",
        ),
    ],
)
def test_a_report_is_held_to_the_gate(args: tuple[str, ...], said: str) -> None:
    assert why(fp8doctor("report", *args)) == said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("80.json", "90.json"), ""),
        (("80.json", "84.json", "--max-regression", "6"), ""),
        (
            ("80.json", "90.json", "--max-regression", "6"),
            "The step takes 90.0 ms, 12.5% more than the 80.0 ms of 80.json. --max-regression allows 6%.",
        ),
        (
            ("80.json", "90.json", "--min-speedup", "1"),
            "The second runs at 0.89x of the first's speed. --min-speedup asks for 1x.",
        ),
        (("80.json", "untimed.json", "--strict"), "There are not two measured steps. --strict needs them."),
    ],
)
def test_two_reports_are_held_to_the_gate(args: tuple[str, ...], said: str) -> None:
    assert why(fp8doctor("compare", *args)) == said


def another(**parts: Any) -> Facts:
    """The job of 90 ms with another GPU, model or batch, or with one of them unknown."""
    facts = timed(90.0)
    return msgspec.structs.replace(
        facts,
        **{name: msgspec.structs.replace(getattr(facts, name), **part) for name, part in parts.items()},
    )


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


NOTHING = "No layer of this model trains in FP8 (0 of "
MOD001 = "To convert it, see 'fp8doctor explain MOD001'."


@pytest.mark.slow
@pytest.mark.parametrize(
    ("report", "said"),
    [
        ("untimed.json", ""),
        ("80.json", ""),
        ("cpu.json", ""),
        ("bf16.json", f"FP8 is required. {NOTHING}169 Linears). {MOD001}"),
        (
            "filtered.json",
            f"FP8 is required. {NOTHING}169 Linears: the filter of the conversion took none). {MOD001}",
        ),
        (
            "unread.json",
            "FP8 is required. fp8doctor cannot tell whether FP8 is engaged: "
            "Network.linears was not recorded.",
        ),
        (
            "empty.json",
            "FP8 is required. No model was examined, so fp8doctor cannot tell whether FP8 is engaged.",
        ),
    ],
)
def test_fp8_that_is_required_is_missed_without_a_gpu(report: str, said: str) -> None:
    assert why(fp8doctor("report", report, "--fail-on", "never", "--require-fp8")) == said
    assert why(fp8doctor("report", report, "--fail-on", "never")) == ""


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
    load_report(RECORDED / f"h200-{name}.json.gz").raise_for("never", require_fp8=True)


CPU = "come from a CPU and do not apply to FP8 on a GPU."


@pytest.mark.slow
@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("report", "cpu.json", "--min-speedup", "1"), f"The times {CPU} --min-speedup 1 needs a GPU."),
        (("report", "cpu.json", "--strict"), f"The times {CPU} --strict needs a GPU."),
        (
            ("report", "cpu.json", "--baseline", "cpu90.json"),
            f"The times of cpu90.json and the step {CPU} --max-regression allows 5%.",
        ),
        (
            ("report", "watched.json", "--baseline", "84.json"),
            f"The times of the step {CPU} --max-regression allows 5%.",
        ),
        (
            ("compare", "cpu90.json", "cpu.json", "--min-speedup", "1"),
            f"The times of cpu90.json and cpu.json {CPU} --min-speedup 1 needs a GPU.",
        ),
        (
            ("compare", "watched90.json", "watched.json", "--min-speedup", "1"),
            f"The times of watched90.json and watched.json {CPU} --min-speedup 1 needs a GPU.",
        ),
        (
            ("compare", "84.json", "watched.json", "--max-regression", "5"),
            f"The times of the step {CPU} --max-regression allows 5%.",
        ),
        (("compare", "watched90.json", "watched.json"), ""),
    ],
)
def test_times_of_a_cpu_pass_no_gate(args: tuple[str, ...], said: str) -> None:
    assert why(fp8doctor(*args)) == said


@pytest.mark.slow
def test_a_cpu_is_no_slower_fp8() -> None:
    """FP8 is emulated on a CPU, and as slow as that is."""
    assert diagnose(on_cpu(400.0)).verdict.status == "fp8_slower"
    assert not diagnose(on_cpu(400.0)).reaches("error")
    assert diagnose(timed(400.0)).reaches("error")


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), [("cpu90", "cpu"), ("watched90", "watched"), ("90", "cpu")])
def test_a_comparison_of_cpu_times_is_headed_as_one(first: str, second: str) -> None:
    told = " ".join(fp8doctor("compare", f"{first}.json", f"{second}.json").stdout.split())
    assert f"{second}.json takes 80.0 ms/step, {first}.json 90.0: the times of" in told
    assert "from a CPU and do not apply to FP8 on a GPU." in told
    assert "of its speed" not in told


ESTIMATE = f"{diagnose(DECODER_468M).verdict.estimated_speedup:.2f}"


@pytest.mark.parametrize(
    ("report", "wanted", "said"),
    [
        ("untimed.json", "0.1", ""),
        (
            "untimed.json",
            "1",
            f"FP8 runs at {ESTIMATE}x of the best BF16, estimated for H100, not measured. "
            "--min-estimated-speedup asks for 1x.",
        ),
        ("watched.json", "0.1", ""),
        ("cpu.json", "0.1", ""),
        (
            "cpu.json",
            "1",
            f"FP8 runs at {ESTIMATE}x of the best BF16, estimated for H100, not measured. "
            "--min-estimated-speedup asks for 1x.",
        ),
        ("80.json", "1.2", ""),
        (
            "80.json",
            "1.3",
            "FP8 runs at 1.25x of the best BF16, measured. --min-estimated-speedup asks for 1.3x.",
        ),
        (
            "bf16.json",
            "0.1",
            f"No speedup of FP8 can be estimated. {NOTHING}169 Linears). {MOD001} "
            "--min-estimated-speedup 0.1 needs an estimate.",
        ),
    ],
)
def test_without_a_gpu_the_estimate_is_held_to_a_gate(report: str, wanted: str, said: str) -> None:
    args = ("report", report, "--fail-on", "never", "--min-estimated-speedup", wanted)
    assert why(fp8doctor(*args)) == said


@pytest.mark.slow
def test_the_estimate_is_the_one_on_the_screen() -> None:
    told = json.loads(fp8doctor("report", "untimed.json", "--format", "json").stdout)["verdict"]
    assert f"{told['estimated_speedup']:.2f}" == ESTIMATE
    assert diagnose(timed(80.0)).verdict.estimated_speedup is None


@pytest.mark.slow
def test_the_gate_is_held_to_the_ratio_of_the_screen() -> None:
    """The median of the rounds is 1.06, the quotient of the two times 1.05."""
    assert "95.0 and 100.0 ms/step" in fp8doctor("report", "apart.json").stdout
    assert why(fp8doctor("report", "apart.json", "--min-speedup", "1.052")) == ""
    told = why(fp8doctor("report", "apart.json", "--min-speedup", "1.053"))
    assert told == "FP8 runs at 1.05x of the best BF16, measured. --min-speedup asks for 1.053x."


@pytest.mark.slow
def test_a_comparison_that_tells_nothing_passes_no_gate() -> None:
    assert "too close to tell apart" in fp8doctor("compare", "90.json", "noisy.json").stdout
    told = why(fp8doctor("compare", "90.json", "noisy.json", "--min-speedup", "0.9"))
    assert told == "The timing is too noisy to tell which is faster. --min-speedup 0.9 needs a clear answer."


@pytest.mark.slow
def test_only_what_the_second_report_adds_fails_a_comparison(folder: Path) -> None:
    healthy = msgspec.structs.replace(
        DECODER_468M, network=msgspec.structs.replace(DECODER_468M.network, linears=())
    )
    Report.of(diagnose(healthy)).save(folder / "healthy.json")
    assert why(fp8doctor("compare", "80.json", "84.json", "--fail-on", "warning")) == ""
    told = why(fp8doctor("compare", "healthy.json", "80.json", "--fail-on", "warning"))
    assert told.startswith("Only the second has CMP001")


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
    assert (
        why(result)
        == "The step takes 84.0 ms, 5.0% more than the 80.0 ms of 80.json. --max-regression allows 1.5%."
    )
    assert "Ignored: CMP001 (compiled by the launcher)" in result.stdout
    assert "(CMP001)" not in result.stdout
    assert Report.of(diagnose(timed(84.0), ignore=("CMP001",), reasons={"CMP001": "why"})).to_dict()[
        "ignored"
    ]
    assert "Ignored: CMP001" in fp8doctor("report", "84.json", "--format", "markdown").stdout


def test_a_project_may_require_fp8_and_an_estimate() -> None:
    project("[tool.fp8doctor]\nfail-on = 'never'\nrequire-fp8 = true\nmin-estimated-speedup = 1\n")
    told = why(fp8doctor("report", "bf16.json"))
    assert told.startswith("FP8 is required. ")
    assert "No speedup of FP8 can be estimated." in told
    assert why(fp8doctor("report", "80.json")) == ""


def test_the_command_line_goes_before_the_project() -> None:
    project("[tool.fp8doctor]\nfail-on = 'warning'\nselect = 'CMP001'\n")
    assert why(fp8doctor("report", "80.json")) == FOUND
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
    assert why(fp8doctor("report", "../../80.json")) == FOUND


@pytest.mark.slow
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
        ("fail_on = 'error'", "has no key 'fail_on' (did you mean fail-on?)"),
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
