"""What the words and options of a command line ask for, and which of them are mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fp8doctor.diagnosis.document import SCHEMA_VERSION, tool
from fp8doctor.facts import Environment, Facts, Target
from fp8doctor.worker.protocol import TrialRequest
from tests.cli.command import Worker, fp8doctor, process
from tests.facts_of import DECODER_468M


@pytest.mark.slow
def test_without_a_command_word_the_target_is_examined(worker: Worker) -> None:
    result = fp8doctor("decoder.py:build_model")
    assert result.exit_code == 0
    asked = {
        "target": "decoder.py:build_model",
        "layers": None,
        "batch": None,
        "seq": None,
        "load_timeout": 600.0,
    }
    assert worker.asked == [{**asked, "trial": TrialRequest()}]
    assert "CMP001" in result.stdout
    assert result.stderr == "fp8doctor: loading the model\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    "args",
    [
        ("--batch", "4", "--seq=8", "model.py", "--layers", "2", "-q"),
        ("model.py", "-q", "--batch", "4", "--seq", "8", "--layers", "2"),
        ("-q", "--fail-on", "never", "--batch", "4", "--seq", "8", "--layers", "2", "--", "model.py"),
    ],
)
def test_options_stand_before_or_after_the_target(worker: Worker, args: tuple[str, ...]) -> None:
    assert fp8doctor(*args).exit_code == 0
    asked = {"target": "model.py", "layers": 2, "batch": 4, "seq": 8, "load_timeout": 600.0}
    assert worker.asked == [{**asked, "trial": TrialRequest()}]


@pytest.mark.slow
def test_the_trial_is_ordered_as_the_options_say(worker: Worker, grave_checks: str) -> None:
    fp8doctor(
        "model.py",
        "--budget",
        "20",
        "--device",
        "cpu",
        "--select",
        "CMP,XYZ",
        "--ignore",
        "CMP002",
        "--checks",
        grave_checks,
    )
    fp8doctor("model.py", "--no-trial")
    order = TrialRequest(
        budget_s=20.0, device="cpu", select=("CMP", "XYZ"), ignore=("CMP002",), checks=(grave_checks,)
    )
    assert [asked["trial"] for asked in worker.asked] == [order, None]


@pytest.mark.slow
def test_options_stand_before_or_after_a_command_word(worker: Worker) -> None:
    for args in (("--format", "json", "env"), ("env", "--format", "json")):
        assert json.loads(fp8doctor(*args).stdout)["schema_version"] == SCHEMA_VERSION
    assert [asked["target"] for asked in worker.asked] == [None, None]


@pytest.mark.slow
def test_the_value_of_an_option_is_no_command_word(
    worker: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert fp8doctor("-qo", "list", "model.py").exit_code == 0
    assert (tmp_path / "list").exists()
    assert worker.asked[0]["target"] == "model.py"


@pytest.mark.slow
@pytest.mark.parametrize("args", [("./list",), ("--", "list")])
def test_a_file_named_like_a_command(worker: Worker, args: tuple[str, ...]) -> None:
    assert fp8doctor(*args).exit_code == 0
    assert worker.asked[0]["target"] == args[-1]


def test_env_examines_no_model(worker: Worker) -> None:
    worker.facts = Facts(
        target=Target(kind="environment", name="environment", attribute=None),
        software=DECODER_468M.software,
        gpus=(),
        gaps={},
    )
    result = fp8doctor("env")
    assert worker.asked == [{"target": None, "layers": None, "batch": None, "seq": None}]
    assert result.exit_code == 0
    assert "! No GPU here: FP8 cannot be timed on this machine" in result.stdout
    assert "No model was examined" not in result.stdout
    assert "te.Linear" not in result.stdout
    assert "Environment only. Run `fp8doctor model.py` to check a model." in result.stdout


def test_env_prints_the_variables_that_ask_for_fp8(worker: Worker) -> None:
    variables = {"ACCELERATE_MIXED_PRECISION": "fp8", "ACCELERATE_FP8_BACKEND": "te"}
    worker.facts = Facts(
        target=Target(kind="environment", name="environment", attribute=None),
        environment=Environment(variables=variables),
        gpus=(),
        gaps={},
    )
    shown = fp8doctor("env", "-v").stdout
    assert "ACCELERATE_MIXED_PRECISION=fp8 · ACCELERATE_FP8_BACKEND=te" in shown


@pytest.mark.parametrize("word", ["run", "compare"])
def test_words_of_later_versions_are_no_commands(worker: Worker, word: str) -> None:
    assert fp8doctor(word, "x").exit_code == 2
    assert not worker.asked


def test_help_names_every_command_and_option() -> None:
    result = fp8doctor("--help")
    assert result.exit_code == 0
    for word in (
        "env",
        "report",
        "list",
        "explain",
        "demo",
        "--format",
        "--save",
        "--select",
        "--ignore",
        "--fail-on",
        "--batch",
        "--seq",
        "--layers",
        "--trace",
        "--assume-gpu",
    ):
        assert word in result.output
    assert fp8doctor("report", "--help").output.startswith("Usage: fp8doctor report [OPTIONS] SAVED")


def test_nothing_at_all_is_wrong_usage() -> None:
    assert fp8doctor().exit_code == 2
    assert process().returncode == 2


def test_version() -> None:
    result = fp8doctor("--version")
    assert (result.exit_code, result.stdout) == (0, f"fp8doctor {tool().version}\n")


# Mistakes are found before the worker starts


@pytest.mark.parametrize(
    "args",
    [
        ("--select", "NOPE"),
        ("--select", ","),
        ("--ignore", "NOPE"),
        ("--assume-gpu", "H300"),
        ("--checks", "nowhere"),
        ("-o", "nowhere/report.md"),
        ("--save", "nowhere/report.json"),
        ("--trace", "nowhere/step.json"),
        ("--trace", "."),
        ("--trace", "step.json", "--no-trial"),
        ("-o", "."),
        ("--format", "pdf"),
        ("--fail-on", "sometimes"),
        ("-v", "-q"),
        ("--bogus",),
        ("second.py",),
        *(
            (option, value)
            for option in ("--batch", "--seq", "--layers")
            for value in ("0", "-1", "many", "1.5", "inf", "")
        ),
        *(
            (option, value)
            for option in ("--load-timeout", "--budget", "--min-speedup")
            for value in ("0", "-1", "soon", "inf", "nan")
        ),
        ("-o", "report.pdf"),
    ],
)
def test_wrong_usage(
    worker: Worker, args: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = fp8doctor("model.py", *args)
    assert result.exit_code == 2
    assert not worker.asked
    assert result.stdout == ""
    assert result.stderr
    assert "Traceback" not in result.stderr


def test_codes_are_prefixes_in_any_case(worker: Worker) -> None:
    outcomes = json.loads(
        fp8doctor(
            "m.py", "--select", "cmp,MOD001", "--select", "shp", "--ignore", "CMP002", "--format", "json"
        ).stdout
    )["outcomes"]
    codes = {outcome["code"] for outcome in outcomes}
    assert {"CMP001", "MOD001"} <= codes
    assert "CMP002" not in codes
    assert {code[:3] for code in codes} == {"CMP", "MOD", "SHP"}


@pytest.mark.slow
def test_the_assumed_gpu_is_named_on_every_modelled_line(worker: Worker) -> None:
    result = fp8doctor("m.py", "--assume-gpu", "b200")
    assert "estimates for B200" in result.stdout
    assert "ms/step, estimated for B200" in " ".join(result.stdout.replace("CMP001", "").split())
