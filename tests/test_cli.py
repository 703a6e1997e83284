"""The command line: words, options, exit codes, what goes to stdout and what to stderr."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import msgspec
import pytest
from click.testing import CliRunner, Result

from fp8doctor import cli, registry
from fp8doctor.cli.explain import LONGEST_CODE, speaking_of
from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.diagnosis.document import schema, tool
from fp8doctor.errors import UserError
from fp8doctor.facts import Arm, Environment, Facts, Target, Trial
from fp8doctor.facts.arm_names import Reason
from fp8doctor.report import Report
from fp8doctor.stages import Doing
from fp8doctor.worker.printed import Printed
from fp8doctor.worker.request import TrialRequest
from tests.facts_of import DECODER_468M
from tests.waiting import LONGEST_S

ROOT = Path(__file__).resolve().parents[1]

GRAVE_CHECK = '''
"""Something grave"""
from fp8doctor.finding import Finding
from fp8doctor.registry import check

@check("XYZ001", "grave", area="step", severity="error")
def grave(facts):
    return Finding(title="grave", explanation="It is grave.")
'''


class Worker:
    """Stands in for `fp8doctor.worker.parent`: remembers what it was asked, answers with ready facts."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.facts: Facts = DECODER_468M
        self.problem: str | None = None
        self.error: BaseException | None = None
        self.traces: dict[str, str | None] = {}
        self.doing = [Doing("loading the model")]
        self.prints = b""

    def examine_in_worker(
        self, target: str | None, *, progress: Any, printed: Printed, **options: Any
    ) -> SimpleNamespace:
        self.asked.append({"target": target, **options})
        for doing in self.doing:
            progress(doing)
        read_end, write_end = printed.pipe()
        os.write(write_end, self.prints)
        printed.take(read_end)
        os.close(read_end)
        os.close(write_end)
        if self.error:
            raise self.error
        return SimpleNamespace(facts=self.facts, problem=self.problem, traces=self.traces)


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Worker:
    worker = Worker()
    monkeypatch.setitem(sys.modules, "fp8doctor.worker.parent", worker)
    return worker


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "LC_ALL", "LANG"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "saved.json"
    Report.of(diagnose(DECODER_468M)).save(path)
    return path


@pytest.fixture
def grave_checks() -> Iterator[str]:
    """A folder of checks with one that always finds something; it is forgotten afterwards."""
    from tempfile import TemporaryDirectory

    from fp8doctor import registry

    with TemporaryDirectory() as folder:
        Path(folder, "grave.py").write_text(GRAVE_CHECK)
        yield folder
    registry._checks.pop("XYZ001", None)


def fp8doctor(*args: str | Path) -> Result:
    return CliRunner().invoke(cli.main, [str(arg) for arg in args])


def process(*args: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-m", "fp8doctor", *map(str, args)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=LONGEST_S,
        check=False,
        **options,
    )


# Words and options


def test_without_a_command_word_the_target_is_examined(worker: Worker) -> None:
    result = fp8doctor("decoder.py:build_model")
    assert result.exit_code == 0
    asked = {
        "target": "decoder.py:build_model",
        "layers": None,
        "batch": None,
        "seq": None,
        "load_timeout": 600.0,
        "python": None,
    }
    assert worker.asked == [{**asked, "trial": TrialRequest()}]
    assert "CMP001" in result.stdout
    assert result.stderr == "fp8doctor: loading the model\n"


def test_a_log_has_one_line_a_stage(worker: Worker) -> None:
    worker.doing = [
        Doing("reading the environment"),
        Doing("loading model.py", 1, 7),
        Doing("timing its matmuls alone", 3, 7, left_s=60.0),
        Doing("timing its \x1b[1m shapes", 3, 7, left_s=60.0),
        Doing("bf16: it died; starting again without it"),
        Doing("loading model.py", 1, 7),
        Doing("timing the variants in turn", 5, 7, left_s=30.2),
    ]
    assert fp8doctor("model.py").stderr.splitlines() == [
        "fp8doctor: reading the environment",
        "fp8doctor: 1/7 loading model.py",
        "fp8doctor: 3/7 timing its matmuls alone (0 s of about 60 s)",
        "fp8doctor: bf16: it died; starting again without it",
        "fp8doctor: 5/7 timing the variants in turn (0 s of about 30 s)",
    ]
    assert fp8doctor("model.py", "-q").stderr == ""


WARNED = b"/x/torch/y.py:1: UserWarning: \x1b[33mslow\x1b[0m\n  y()\n 10%|#\r100%|##\n" * 2


def test_warnings_of_libraries_are_held_back_where_all_goes_well(worker: Worker) -> None:
    worker.prints = WARNED
    assert fp8doctor("model.py").stderr == "fp8doctor: loading the model\n"
    result = fp8doctor("model.py", "-v", "--format", "json")
    assert json.loads(result.stdout)["verdict"]
    assert result.stderr.splitlines()[1:] == [
        "fp8doctor: libraries and the examined file printed on stderr, each line once:",
        "/x/torch/y.py:1: UserWarning: slow (2 times)",
        "  y() (2 times)",
        "100%|## (2 times)",
    ]
    worker.prints = b""
    assert fp8doctor("model.py", "-v").stderr == "fp8doctor: loading the model\n"


@pytest.mark.parametrize("problem", [None, "the worker was killed by SIGSEGV while loading model.py"])
def test_they_are_whole_beside_a_failure(worker: Worker, problem: str | None) -> None:
    worker.prints, worker.problem = WARNED, problem
    worker.error = None if problem else UserError("model.py raised ValueError: no")
    told = fp8doctor("model.py", "-q").stderr.splitlines()
    assert told == [
        "fp8doctor: meanwhile libraries and the examined file printed on stderr:",
        *["/x/torch/y.py:1: UserWarning: slow", "  y()", "100%|##"] * 2,
        f"fp8doctor: {problem or worker.error}",
    ]


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
    asked = {"target": "model.py", "layers": 2, "batch": 4, "seq": 8, "load_timeout": 600.0, "python": None}
    assert worker.asked == [{**asked, "trial": TrialRequest()}]


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


def timed(as_is_ms: float) -> Facts:
    arms = tuple(
        Arm(name=name, tried=True, reason=None, step_ms=ms, rounds_ms=(ms,) * 6)
        for name, ms in (("as_is", as_is_ms), ("bf16", 100.0))
    )
    return msgspec.structs.replace(
        DECODER_468M, trial=Trial(device="cuda", gpu="NVIDIA H200", blocks={}, arms=arms, reliable=True)
    )


@pytest.mark.parametrize(
    ("as_is_ms", "args", "code"),
    [
        (400.0, (), 1),
        (400.0, ("--fail-on", "never"), 0),
        (80.0, (), 0),
        (80.0, ("--min-speedup", "1.2"), 0),
        (80.0, ("--min-speedup", "1.3"), 1),
        (80.0, ("--strict",), 0),
        (None, ("--strict",), 1),
        (None, ("--min-speedup", "1.3"), 1),
        (None, (), 0),
    ],
)
def test_what_is_measured_decides_the_exit_code(
    worker: Worker, as_is_ms: float | None, args: tuple[str, ...], code: int
) -> None:
    worker.facts = DECODER_468M if as_is_ms is None else timed(as_is_ms)
    assert fp8doctor("model.py", *args).exit_code == code


def test_a_trace_goes_where_it_was_asked_for(
    worker: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    worker.facts, worker.traces = timed(80.0), {"/here/step.json": None, "/here/step.bf16.json": None}
    result = fp8doctor("model.py", "--trace", "step.json")
    assert worker.asked[0]["trial"] == TrialRequest(trace=str(tmp_path / "step.json"))
    assert result.exit_code == 0
    assert result.stderr.endswith(
        "fp8doctor: a trace is in /here/step.json\nfp8doctor: a trace is in /here/step.bf16.json\n"
    )
    assert "step.json" not in result.stdout
    assert fp8doctor("model.py", "--trace", "step.json", "-q").stderr == ""


@pytest.mark.parametrize(
    ("trial", "traces", "said"),
    [
        (
            None,
            {},
            "--trace has nothing to keep: there is no GPU to time a step on; --device cpu times "
            "it on the CPU",
        ),
        (Trial(arms=(), reason="it is sharded"), {}, "--trace has nothing to keep: it is sharded"),
        (
            Trial(arms=(), reason=None, gaps={"trial.arms.breakdown": "it fails"}),
            {},
            "--trace has nothing to keep: it fails",
        ),
        (
            Trial(arms=(Arm(name="as_is", tried=False, reason="it is short"),), reason=None),
            {},
            "--trace has nothing to keep: it is short",
        ),
        (
            Trial(arms=(), reason=None),
            {"step.json": "No space left on device"},
            "cannot write step.json: No space left on device",
        ),
    ],
)
def test_a_trace_that_is_missing_is_an_error(
    worker: Worker, trial: Trial | None, traces: dict[str, str | None], said: str
) -> None:
    worker.facts = DECODER_468M if trial is None else msgspec.structs.replace(DECODER_468M, trial=trial)
    worker.traces = traces
    result = fp8doctor("model.py", "--trace", "step.json")
    assert result.exit_code == 2
    assert result.stderr.endswith(f"fp8doctor: {said}\n")
    assert result.stdout


@pytest.mark.parametrize(
    ("file", "of"),
    [
        ("step.json", "step.bf16.json"),
        ("step.pt.trace.json.gz", "step.pt.trace.bf16.json.gz"),
        ("step.gz", "step.bf16.gz"),
        ("step", "step.bf16"),
    ],
)
def test_the_other_arms_are_beside_the_step_as_it_is(file: str, of: str) -> None:
    order = TrialRequest(60.0, trace=f"/here/{file}")
    assert (str(order.trace_of("as_is")), str(order.trace_of("bf16"))) == (f"/here/{file}", f"/here/{of}")


def test_options_stand_before_or_after_a_command_word(worker: Worker) -> None:
    for args in (("--format", "json", "env"), ("env", "--format", "json")):
        assert json.loads(fp8doctor(*args).stdout)["schema_version"] == 1
    assert [asked["target"] for asked in worker.asked] == [None, None]


def test_the_value_of_an_option_is_no_command_word(
    worker: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert fp8doctor("-qo", "list", "model.py").exit_code == 0
    assert (tmp_path / "list").exists()
    assert worker.asked[0]["target"] == "model.py"


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
    assert worker.asked == [{"target": None, "layers": None, "batch": None, "seq": None, "python": None}]
    assert result.exit_code == 0
    assert "No model was examined" in result.stdout
    assert "te.Linear" not in result.stdout
    assert "Next  fp8doctor model.py times it on a GPU" in result.stdout


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


def test_the_assumed_gpu_is_named_on_every_modelled_line(worker: Worker) -> None:
    result = fp8doctor("m.py", "--assume-gpu", "b200")
    assert "costs modelled for B200" in result.stdout
    assert "ms a step, modelled on B200" in " ".join(result.stdout.replace("CMP001", "").split())


# Exit codes


@pytest.mark.parametrize(
    ("fail_on", "code"), [("never", 0), ("info", 1), ("warning", 1), ("error", 0), (None, 0)]
)
def test_findings_decide_the_exit_code(worker: Worker, fail_on: str | None, code: int) -> None:
    assert (
        fp8doctor("m.py", "--select", "CMP001", *(("--fail-on", fail_on) if fail_on else ())).exit_code
        == code
    )


def test_an_error_fails_by_default(worker: Worker, grave_checks: str) -> None:
    assert fp8doctor("m.py", "--checks", grave_checks).exit_code == 1
    assert fp8doctor("m.py", "--checks", grave_checks, "--fail-on", "never").exit_code == 0


def test_a_users_mistake_is_a_sentence_and_their_own_frames(worker: Worker) -> None:
    worker.error = UserError(
        "model.py could not be loaded: KeyError: 'x'", '  File "model.py", line 3\n    x["x"]\n'
    )
    result = fp8doctor("model.py")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.endswith(
        'fp8doctor: model.py could not be loaded: KeyError: \'x\'\n  File "model.py", line 3\n    x["x"]\n'
    )


def test_an_incomplete_report_is_printed_and_written_nowhere(worker: Worker, tmp_path: Path) -> None:
    worker.facts = Facts(
        target=Target(kind="file", name="model.py", attribute=None),
        gaps={"network": "the worker was killed by SIGKILL"},
    )
    worker.problem = "the worker was killed by SIGKILL (out of memory?) while loading model.py"
    result = fp8doctor("model.py", "-o", tmp_path / "out.json", "--save", tmp_path / "saved.json")
    assert result.exit_code == 2
    assert json.loads(result.stdout)["verdict"]["status"] == "not_measured"
    assert result.stderr.endswith(
        "fp8doctor: the worker was killed by SIGKILL (out of memory?) while loading model.py\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_mistake_of_ours_is_a_sentence_too(worker: Worker) -> None:
    worker.error = ZeroDivisionError("division by zero")
    result = fp8doctor("model.py")
    assert result.exit_code == 2
    assert "internal error, ZeroDivisionError: division by zero" in result.stderr
    assert "-v" in result.stderr
    assert "Traceback" not in result.stderr
    assert "Traceback" in fp8doctor("model.py", "-v").stderr


def test_control_characters_reach_no_terminal(worker: Worker) -> None:
    worker.error = UserError("no file \x1b[31mred\nand more", "frame\x1b[2J")
    assert "\x1b" not in fp8doctor("model.py").stderr


def test_ctrl_c(worker: Worker) -> None:
    worker.error = KeyboardInterrupt()
    result = fp8doctor("model.py", "-q")
    assert result.exit_code == 130
    assert result.stderr.strip() == "fp8doctor: interrupted"


KNOWN = "RuntimeError: derivative for aten::_scaled_mm is not implemented"


def test_what_is_known_of_an_error_follows_it(worker: Worker) -> None:
    worker.problem = f"model.py: its own step raises {KNOWN}"
    told = fp8doctor("model.py", "-q").stderr.splitlines()
    assert told[0] == f"fp8doctor: {worker.problem}"
    assert told[1].startswith("A layer that was made for inference in FP8 is trained")
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
    worker.facts = msgspec.structs.replace(DECODER_468M, trial=trial)
    result = fp8doctor("model.py", "-q")
    assert result.exit_code == 2
    assert "CMP001" in result.stdout
    assert result.stderr == "fp8doctor: its own step fails\n"


def heed_interrupts() -> None:
    """A job that a shell put into the background ignores SIGINT, and so would its children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_ctrl_c_of_a_real_process(tmp_path: Path) -> None:
    script = (
        "import sys, time, types\n"
        "def examine_in_worker(*args, **options): print('ready', flush=True); time.sleep(1000)\n"
        "sys.modules['fp8doctor.worker.parent'] = "
        "types.SimpleNamespace(examine_in_worker=examine_in_worker)\n"
        "from fp8doctor.cli import main\n"
        "main(['model.py'])\n"
    )
    running = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        preexec_fn=heed_interrupts,
    )
    assert running.stdout
    assert running.stdout.readline() == "ready\n"
    running.send_signal(signal.SIGINT)
    _, stderr = running.communicate(timeout=LONGEST_S)
    assert running.returncode == 130
    assert stderr.endswith("fp8doctor: interrupted\n")
    assert "Traceback" not in stderr


# What is written where


def test_json_on_stdout_is_one_document(worker: Worker) -> None:
    result = fp8doctor("m.py", "--format", "json", "-v")
    jsonschema.validate(json.loads(result.stdout), schema())


@pytest.mark.parametrize(
    ("name", "begins"),
    [
        ("r.json", "{"),
        ("r.md", "## fp8doctor"),
        ("r.html", "<!DOCTYPE html>"),
        ("r.txt", "fp8doctor "),
        ("r.log", "fp8doctor "),
        ("R.JSON", "{"),
    ],
)
def test_the_suffix_decides_the_format(worker: Worker, tmp_path: Path, name: str, begins: str) -> None:
    result = fp8doctor("m.py", "-o", tmp_path / name)
    assert result.stdout == ""
    assert (tmp_path / name).read_text("utf-8").startswith(begins)


def test_a_named_format_goes_before_the_suffix(worker: Worker, tmp_path: Path) -> None:
    fp8doctor("m.py", "--format", "markdown", "-o", tmp_path / "r.json")
    assert (tmp_path / "r.json").read_text("utf-8").startswith("## fp8doctor")


def test_save_and_replay(worker: Worker, tmp_path: Path) -> None:
    first = fp8doctor("m.py", "--save", tmp_path / "a.json")
    replayed = fp8doctor("report", tmp_path / "a.json", "--save", tmp_path / "b.json")
    assert first.stdout == replayed.stdout != ""
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()


def test_report_takes_the_output_options(saved: Path, grave_checks: str) -> None:
    assert fp8doctor("report", saved, "--fail-on", "warning", "--select", "CMP001").exit_code == 1
    assert fp8doctor("--format=markdown", "report", saved).stdout.startswith("## fp8doctor")
    assert "modelled on L40S" in fp8doctor("report", saved, "--assume-gpu", "l40s").stdout
    assert fp8doctor("report", saved, "--checks", grave_checks).exit_code == 1


@pytest.mark.parametrize("content", [None, "", "{", "[]", "{}", '{"schema_version": 99, "facts": {}}'])
def test_what_is_no_report(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "saved.json"
    if content is not None:
        path.write_text(content)
    result = fp8doctor("report", path)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("fp8doctor: cannot ")
    assert len(result.stderr.splitlines()) == 1


def test_demo(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli.commands, "DEMO", saved)
    result = fp8doctor("demo")
    assert result.exit_code == 0
    assert "168 of 168 FP8 Linears run uncompiled" in result.stdout


def test_quiet_is_quiet(worker: Worker) -> None:
    assert fp8doctor("m.py", "-q").stderr == ""


@pytest.mark.parametrize(
    ("variables", "colours"),
    [
        ({}, False),
        ({"FORCE_COLOR": "1"}, True),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False),
        ({"FORCE_COLOR": "1", "TERM": "dumb"}, True),
    ],
)
def test_colours(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], colours: bool
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert ("\x1b[" in fp8doctor("m.py").stdout) is colours


@pytest.mark.parametrize(
    ("variables", "ascii"),
    [
        ({"LC_ALL": "C"}, True),
        ({"LANG": "POSIX"}, True),
        ({"LANG": "C.UTF-8"}, False),
        ({"LANG": "C", "LC_ALL": "en_GB.UTF-8"}, False),
    ],
)
def test_ascii_where_the_locale_is(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], ascii: bool
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert fp8doctor("m.py").stdout.isascii() is ascii


def test_ascii_where_stdout_is(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "latin-1")
    result = process("report", saved)
    assert result.returncode == 0
    assert result.stdout.isascii()
    assert process("report", saved, "--format", "markdown", encoding="latin-1").returncode == 0


@pytest.mark.parametrize(("fail_on", "code"), [("warning", 1), ("never", 0)])
def test_a_reader_who_leaves_early_changes_no_exit_code(saved: Path, fail_on: str, code: int) -> None:
    command = [
        sys.executable,
        "-m",
        "fp8doctor",
        "report",
        str(saved),
        "--format",
        "json",
        "--fail-on",
        fail_on,
        "--select",
        "CMP001",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT) as running:
        assert running.stdout
        assert running.stderr
        running.stdout.close()
        why = b"fp8doctor: exit 1: found CMP001 (--fail-on warning)\n"
        assert running.stderr.read() == (why if code else b"")
        assert running.wait(LONGEST_S) == code


@pytest.mark.parametrize("terminal", ["xterm-256color", "dumb"])
def test_on_a_real_terminal(saved: Path, terminal: str) -> None:
    """Colours unless it is dumb, and no line wider than the terminal."""
    outside, inside = os.openpty()
    fcntl.ioctl(inside, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")} | {
        "TERM": terminal
    }
    with subprocess.Popen(
        [sys.executable, "-m", "fp8doctor", "report", str(saved)], stdout=inside, cwd=ROOT, env=environment
    ) as running:
        os.close(inside)
        screen = b""
        while running.poll() is None or b"More:" not in screen:
            try:
                screen += os.read(outside, 1 << 16)
            except OSError:
                break
    os.close(outside)
    text = screen.decode()
    assert ("\x1b[" in text) is (terminal != "dumb")
    assert max(len(line) for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()) <= 60


# The catalogue


def test_list() -> None:
    result = fp8doctor("list")
    assert result.exit_code == 0
    assert any(line.startswith("CMP001") and "eager-float8" in line for line in result.stdout.splitlines())
    listed = json.loads(fp8doctor("list", "--format", "json").stdout)
    assert {"code", "name", "area", "severity", "title"} == set(listed[0])
    assert len(listed) == len(result.stdout.splitlines())


def test_list_shows_checks_of_a_folder(grave_checks: str) -> None:
    assert "XYZ001" in fp8doctor("list", "--checks", grave_checks).stdout


@pytest.mark.parametrize("code", ["CMP001", "cmp001", "eager-float8"])
def test_explain(code: str) -> None:
    result = fp8doctor("explain", code)
    assert result.stdout.startswith(
        "CMP001 eager-float8 · compilation · warning\n\nFP8 Linears that run eagerly\n"
    )
    page = json.loads(fp8doctor("explain", code, "--format", "json").stdout)
    assert page["code"] == "CMP001"
    assert page["page"] in result.stdout


def test_explain_what_is_not_there() -> None:
    result = fp8doctor("explain", "CMP01")
    assert result.exit_code == 2
    assert "there is CMP001" in result.stderr


TRACEBACK = """Traceback (most recent call last):
  File "/home/somebody/train.py", line 9, in <module>
    login(token="hf_AbCdEfGhIjKlMnOpQrStUvWxYz0123456789")
RuntimeError: Expected trailing dimension of mat1 to be divisible by 16 but got mat1 shape: (1003x1000).
"""


def test_explain_an_error_by_its_text() -> None:
    page = fp8doctor("explain", TRACEBACK).stdout
    assert page.startswith("Expected trailing dimension of mat1 to be divisible by 16")
    assert "Cause. A side of an FP8 GEMM" in page
    assert "Found by: SHP001 unaligned-dimensions. fp8doctor explain SHP001" in page
    assert "Source: torch aten/src/ATen/native/cuda/ScaledBlas.cpp" in page
    assert "hf_" not in page
    assert max(map(len, page.splitlines())) <= 100


def test_explain_takes_an_error_from_stdin_and_without_quotes() -> None:
    as_argument = fp8doctor("explain", TRACEBACK).stdout
    assert CliRunner().invoke(cli.main, ["explain", "-"], input=TRACEBACK).stdout == as_argument
    assert fp8doctor("explain", *TRACEBACK.split()).stdout == as_argument


def test_explain_an_error_in_json() -> None:
    (error,) = json.loads(fp8doctor("explain", "--format", "json", TRACEBACK).stdout)["errors"]
    assert error["codes"] == ["SHP001"]
    assert set(error) == {"says", "pattern", "cause", "lines", "versions", "source", "codes"}


def test_explain_an_error_that_is_not_known() -> None:
    text = "RuntimeError: nobody has seen this before, hf_AbCdEfGhIjKlMnOpQrStUvWxYz0123456789"
    result = fp8doctor("explain", text)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "holds none of the" in result.stderr
    assert "hf_" not in result.stderr
    assert "hf_" not in fp8doctor("explain", text.split()[-1]).stderr


@pytest.mark.parametrize("text", ["", " \n"])
def test_explain_nothing(text: str) -> None:
    result = CliRunner().invoke(cli.main, ["explain", "-"], input=text)
    assert result.exit_code == 2
    assert "nothing to explain" in result.stderr


def test_explain_looks_for_no_word_as_long_as_a_log() -> None:
    """Ten megabytes in one word took 12 s to compile as a pattern."""
    catalogue = registry.discover()
    word = max((word for check in catalogue for word in check.page.split()), key=len)
    assert speaking_of("checkpointing", catalogue)
    assert len(word) > LONGEST_CODE
    assert speaking_of(word, catalogue) == []


@pytest.mark.parametrize(
    ("words", "first"),
    [
        ("LoRA", "LORA"),
        ("checkpointing", "CKP"),
        ("gradient checkpointing", "CKP"),
        ("load_in_fp8", "MOD003"),
        ("max-autotune", "STP001"),
        ("cuda graphs", "STP001"),
        ("out of memory", "MEM002"),
    ],
)
def test_explain_finds_the_words_of_a_user(words: str, first: str) -> None:
    result = fp8doctor("explain", words)
    assert result.exit_code == 0
    codes = re.findall(r"^[A-Z]{3,4}\d{3}", result.stdout, re.MULTILINE)
    assert codes[0].startswith(first)
    assert result.stdout == fp8doctor("explain", *words.split()).stdout
    assert json.loads(fp8doctor("explain", words, "--format", "json").stdout)["checks"][0]["code"].startswith(
        first
    )


# Real processes


@pytest.mark.parametrize(
    "args",
    [
        ("--help",),
        ("--version",),
        ("list",),
        ("explain", "CMP001"),
        ("explain", "lora"),
        ("explain", TRACEBACK),
        ("report", "saved.json"),
    ],
)
def test_torch_is_not_imported(args: tuple[str, ...], saved: Path) -> None:
    args = tuple(str(saved) if arg == "saved.json" else arg for arg in args)
    script = (
        f"import sys\nfrom fp8doctor.cli import main\ntry:\n    main({args!r})\nfinally:\n    assert "
        "'torch' not in sys.modules, 'torch was imported'\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
        timeout=LONGEST_S,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout


@pytest.mark.slow
def test_a_model_file_from_end_to_end(tmp_path: Path) -> None:
    (tmp_path / "small.py").write_text(
        'import torch\nprint("users own words")\nmodel = torch.nn.Sequential(torch.nn.Linear(64, 128), '
        "torch.nn.Linear(128, 64))\n"
    )
    result = process("small.py", "--format", "json", "--save", "saved.json", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["verdict"]["status"] == "no_fp8"
    assert document["facts"]["target"] == {
        "kind": "file",
        "name": "small.py",
        "attribute": "model",
        "layers": None,
    }
    assert "users own words" in result.stderr
    assert json.loads((tmp_path / "saved.json").read_text("utf-8")) == document


@pytest.mark.slow
def test_a_model_file_that_fails_from_end_to_end(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("def build_model():\n    return {}['missing']\n")
    result = process("broken.py", "-q", cwd=tmp_path)
    assert result.returncode == 2
    assert "KeyError: 'missing'" in result.stderr
    assert "{}['missing']" in result.stderr
    assert "fp8doctor/" not in result.stderr
