"""What goes to stdout, what to stderr, and what into which file."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import msgspec
import pytest

from fp8doctor import cli
from fp8doctor.cli.delivery import FORMATS
from fp8doctor.diagnosis.document import schema
from fp8doctor.errors import UserError
from fp8doctor.facts import Arm, Trial
from fp8doctor.stages import Doing
from fp8doctor.worker.protocol import TrialRequest
from tests.cli.command import Worker, fp8doctor, timed
from tests.facts_of import DECODER_468M


@pytest.mark.slow
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


@pytest.mark.slow
def test_warnings_of_libraries_are_held_back_where_all_goes_well(worker: Worker) -> None:
    worker.prints = WARNED
    assert fp8doctor("model.py").stderr == "fp8doctor: loading the model\n"
    result = fp8doctor("model.py", "-v", "--format", "json")
    assert json.loads(result.stdout)["verdict"]
    assert result.stderr.splitlines()[1:] == [
        "fp8doctor: libraries and your file printed on stderr, each line once:",
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
        "fp8doctor: libraries and your file printed on stderr:",
        *["/x/torch/y.py:1: UserWarning: slow", "  y()", "100%|##"] * 2,
        f"fp8doctor: {problem or worker.error}",
    ]


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
    assert "/here" not in result.stdout
    assert fp8doctor("model.py", "--trace", "step.json", "-q").stderr == ""


@pytest.mark.slow
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


@pytest.mark.slow
def test_json_on_stdout_is_one_document(worker: Worker) -> None:
    result = fp8doctor("m.py", "--format", "json", "-v")
    jsonschema.validate(json.loads(result.stdout), schema())


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_named_format_goes_before_the_suffix(worker: Worker, tmp_path: Path) -> None:
    fp8doctor("m.py", "--format", "markdown", "-o", tmp_path / "r.json")
    assert (tmp_path / "r.json").read_text("utf-8").startswith("## fp8doctor")


@pytest.mark.gate(".any-text", ".github-json", "-markdown", ".log-github", ".any-html", "-junit", "-github")
@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("suffix", [".any", ".github", "", ".log"])
def test_every_format_is_written_to_a_file_of_any_name(
    format: str, suffix: str, saved: Path, tmp_path: Path
) -> None:
    printed = fp8doctor("report", saved, "--format", format).stdout
    file = tmp_path / f"report{suffix}"
    result = fp8doctor("report", saved, "--format", format, "-o", file)
    assert result.stdout == ""
    assert file.read_bytes().decode() == printed


@pytest.mark.slow
def test_the_suffix_of_annotations_says_their_format(saved: Path, tmp_path: Path) -> None:
    fp8doctor("report", saved, "-o", tmp_path / "x.github")
    assert (tmp_path / "x.github").read_text("utf-8").startswith("::")


@pytest.mark.slow
def test_annotations_are_printed_beside_files_of_other_formats(saved: Path, tmp_path: Path) -> None:
    result = fp8doctor("report", saved, "--format", "github", "-o", tmp_path / "x.md")
    assert result.stdout.startswith("::")
    assert (tmp_path / "x.md").read_text("utf-8").startswith("## fp8doctor")


def test_a_suffix_that_says_nothing_is_wrong_usage(saved: Path, tmp_path: Path) -> None:
    result = fp8doctor("report", saved, "-o", tmp_path / "x.yaml")
    assert result.exit_code == 2
    assert "The format of" in result.stderr
    given = f"give --format {', '.join(FORMATS[:-1])} or {FORMATS[-1]}"
    assert given in " ".join(result.stderr.split())


def test_a_withdrawn_format_is_answered_with_the_others(saved: Path) -> None:
    said = fp8doctor("report", saved, "--format", "sarif")
    assert said.exit_code == 2
    assert all(f"'{each}'" in said.stderr for each in FORMATS)


@pytest.mark.slow
def test_what_is_written_is_told_with_the_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    verdict = "fp8doctor: FP8 is 2.5x slower than BF16: 917.8 and 369.8 ms/step, measured\n"
    both = fp8doctor("demo", "-o", "a.html", "-o", "a.md", "--save", "b.json")
    assert (both.stdout, both.stderr) == ("", f"{verdict}fp8doctor: wrote a.html, a.md, b.json\n")
    saved = fp8doctor("demo", "--save", "b.json")
    assert "FP8 is 2.5x slower" in saved.stdout
    assert saved.stderr == "fp8doctor: wrote b.json\n"
    machine = fp8doctor("demo", "--format", "json", "--save", "b.json")
    assert json.loads(machine.stdout)["verdict"]["status"] == "fp8_slower"
    assert machine.stderr == f"{verdict}fp8doctor: wrote b.json\n"
    assert fp8doctor("demo", "-q", "-o", "a.md").stderr == ""
    page = fp8doctor("compare", "b.json", "b.json", "-o", "c.md")
    assert (page.stdout, page.stderr) == ("", "fp8doctor: wrote c.md\n")


@pytest.mark.slow
@pytest.mark.parametrize("rest", [(), ("-o", "d.md"), ("--save", "d.json"), ("--format", "json")])
def test_the_demo_succeeds(rest: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shown = fp8doctor("demo", *rest)
    assert shown.exit_code == 0
    assert "exit 1" not in shown.stderr
    assert fp8doctor("demo", *rest, "--fail-on", "error").exit_code == 1


@pytest.mark.slow
def test_save_and_replay(worker: Worker, tmp_path: Path) -> None:
    first = fp8doctor("m.py", "--save", tmp_path / "a.json")
    replayed = fp8doctor("report", tmp_path / "a.json", "--save", tmp_path / "b.json")
    assert first.exit_code == replayed.exit_code == 0
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()


@pytest.mark.slow
def test_report_takes_the_output_options(saved: Path, grave_checks: str) -> None:
    assert fp8doctor("report", saved, "--fail-on", "warning", "--select", "CMP001").exit_code == 1
    assert fp8doctor("--format=markdown", "report", saved).stdout.startswith("## fp8doctor")
    assert "estimated for L40S" in fp8doctor("report", saved, "--assume-gpu", "l40s").stdout
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


@pytest.mark.slow
def test_demo(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli.commands, "DEMO", saved)
    result = fp8doctor("demo")
    assert result.exit_code == 0
    assert "168 of 168 FP8 Linears are not compiled" in result.stdout


@pytest.mark.slow
def test_quiet_is_quiet(worker: Worker) -> None:
    assert fp8doctor("m.py", "-q").stderr == ""


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.parametrize("started", [True, False])
def test_the_page_opens_in_a_browser(started: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import webbrowser

    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", lambda address: opened.append(address) or started)
    monkeypatch.chdir(tmp_path)
    said = fp8doctor("demo", "-o", "a.md", "-o", "a.html", "--open")
    assert opened == [(tmp_path / "a.html").as_uri()]
    assert ("no browser could be started; open a.html yourself" in said.stderr) != started


def test_a_page_to_open_has_to_be_written(saved: Path) -> None:
    said = fp8doctor("report", saved, "--open")
    assert said.exit_code == 2
    assert "Add -o report.html" in said.stderr
