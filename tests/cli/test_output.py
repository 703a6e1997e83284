"""What goes to stdout, what to stderr, and what into which file."""

import json
from pathlib import Path

import jsonschema
import pytest

from fp8doctor.cli.options import FORMATS
from fp8doctor.diagnosis.document import SCHEMA_VERSION, schema
from fp8doctor.errors import UserError
from fp8doctor.stages import Doing, Stage
from tests.cli.command import ROOT, Worker, fp8doctor

VERDICT = "fp8doctor: FP8 is 2.5x slower than BF16: 917.8 and 369.8 ms/step, measured at two depths\n"
WARNED = b"/x/torch/y.py:1: UserWarning: \x1b[33mslow\x1b[0m\n  y()\n 10%|#\r100%|##\n" * 2


def test_a_log_has_one_line_a_stage(worker: Worker) -> None:
    worker.doing = [
        Doing("loading model.py", Stage.LOADING),
        Doing("timing its \x1b[1m shapes", Stage.FORWARD, left_s=60.0),
        Doing("bf16: it died; starting again without it"),
        Doing("loading model.py", Stage.LOADING),
        Doing("timing the variants in turn", Stage.TIMING, left_s=30.2),
    ]
    said = fp8doctor("model.py").stderr
    assert "\x1b" not in said
    begins = [line.partition("fp8doctor: ")[2][:3] for line in said.splitlines()]
    assert begins == ["loa", "tim", "bf1", "tim"]
    assert fp8doctor("model.py", "-q").stderr == ""


def test_warnings_of_libraries_are_held_back_where_all_goes_well(worker: Worker) -> None:
    worker.prints = WARNED
    assert "slow" not in fp8doctor("model.py").stderr
    told = fp8doctor("model.py", "-v", "--format", "json")
    assert json.loads(told.stdout)["verdict"]
    assert "/x/torch/y.py:1: UserWarning: slow (2 times)" in told.stderr.splitlines()


@pytest.mark.parametrize("problem", [None, "the worker was killed by SIGSEGV while loading model.py"])
def test_they_are_whole_beside_a_failure(worker: Worker, problem: str | None) -> None:
    worker.prints, worker.problem = WARNED, problem
    worker.error = None if problem else UserError("model.py raised ValueError: no")
    told = fp8doctor("model.py", "-q").stderr.splitlines()
    assert told[1:] == [
        *["/x/torch/y.py:1: UserWarning: slow", "  y()", "100%|##"] * 2,
        f"fp8doctor: {problem or worker.error}",
    ]


SUFFIXES = {".json": "{", ".md": "## fp8", ".html": "<!DOC", ".txt": "fp8", ".log": "fp8"}
OF_REPORTS = {".github": "::", ".XML": "<?"}
"""How a file of this suffix begins; other pages have no form for build servers."""


@pytest.mark.parametrize(
    "words", ["report SAVED", "compare SAVED SAVED", "plan SAVED --gpu H100", "trace TRACE"]
)
def test_the_suffix_decides_the_format(words: str, saved: Path, trace: Path, tmp_path: Path) -> None:
    files = {"SAVED": saved, "TRACE": trace}
    command = [files.get(word, word) for word in words.split()]
    for suffix, begins in (SUFFIXES | (OF_REPORTS if command[0] == "report" else {})).items():
        assert fp8doctor(*command, "-o", tmp_path / f"r{suffix}").stdout == ""
        assert (tmp_path / f"r{suffix}").read_text("utf-8").lstrip().startswith(begins), suffix


def test_a_format_that_is_named_goes_before_the_suffix(saved: Path, tmp_path: Path) -> None:
    fp8doctor("report", saved, "--format", "markdown", "-o", tmp_path / "r.json")
    assert (tmp_path / "r.json").read_text("utf-8").startswith("## fp8doctor")
    beside = fp8doctor("report", saved, "--format", "github", "-o", tmp_path / "x.md")
    assert beside.stdout.startswith("::")
    assert not fp8doctor("report", saved, "--format", "github", "-o", tmp_path / "x.log").stdout
    assert (tmp_path / "x.log").read_text("utf-8") == beside.stdout


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS)
def test_a_file_holds_what_is_printed(format: str, saved: Path, tmp_path: Path) -> None:
    printed = fp8doctor("report", saved, "--format", format).stdout
    for suffix in (".any", ""):
        file = tmp_path / f"report{suffix}"
        fp8doctor("report", saved, "--format", format, "-o", file)
        assert file.read_bytes().decode() == printed
    if format == "json":
        jsonschema.validate(json.loads(printed), schema())


def test_what_is_written_is_told_with_the_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    both = fp8doctor("demo", "-o", "a.html", "-o", "a.md", "--save", "b.json")
    assert (both.stdout, both.stderr) == ("", f"{VERDICT}fp8doctor: wrote a.html, a.md, b.json\n")
    saved = fp8doctor("demo", "--save", "b.json")
    assert saved.stdout
    assert saved.stderr == "fp8doctor: wrote b.json\n"
    machine = fp8doctor("demo", "--format", "json", "--save", "b.json")
    assert json.loads(machine.stdout)["verdict"]["status"] == "fp8_slower"
    assert fp8doctor("demo", "-q", "-o", "a.md").stderr == ""
    page = fp8doctor("compare", "b.json", "b.json", "-o", "c.md")
    assert (page.stdout, page.stderr) == ("", "fp8doctor: wrote c.md\n")
    assert fp8doctor("demo").exit_code == 0
    assert fp8doctor("demo", "--fail-on", "error").exit_code == 1


def test_save_and_replay(worker: Worker, tmp_path: Path) -> None:
    first = fp8doctor("m.py", "--save", tmp_path / "a.json")
    replayed = fp8doctor("report", tmp_path / "a.json", "--save", tmp_path / "b.json")
    assert first.exit_code == replayed.exit_code == 0
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()


def test_report_takes_the_output_options(saved: Path, grave_checks: str) -> None:
    assert fp8doctor("report", saved, "--fail-on", "warning", "--select", "CMP001").exit_code == 1
    assert fp8doctor("--format=markdown", "report", saved).stdout.startswith("## fp8doctor")
    assert "estimated for L40S" in fp8doctor("report", saved, "--assume-gpu", "l40s").stdout
    assert fp8doctor("report", saved, "--checks", grave_checks).exit_code == 1


@pytest.mark.parametrize(
    ("variables", "colours", "ascii"),
    [
        ({}, False, False),
        ({"FORCE_COLOR": "1"}, True, False),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False, False),
        ({"LC_ALL": "C"}, False, True),
        ({"LANG": "POSIX"}, False, True),
        ({"LANG": "C", "LC_ALL": "en_GB.UTF-8"}, False, False),
    ],
)
def test_colours_and_ascii(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], colours: bool, ascii: bool
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    shown = fp8doctor("m.py").stdout
    assert ("\x1b[" in shown, shown.isascii()) == (colours, ascii)


RECORDED = ROOT / "tests" / "patients" / "recorded"
EAGER, COMPILED, UNTIMED = (
    str(RECORDED / f"h200-{name}.json.gz") for name in ("decoder_468m", "decoder_468m_compiled", "moe")
)


def test_a_trace_and_a_comparison_are_documents_too(trace: Path) -> None:
    for args, kind in ((("trace", trace), "traces"), (("compare", EAGER, COMPILED), "comparison")):
        result = fp8doctor(*args, "--format", "json")
        document = json.loads(result.stdout)
        assert (document["schema_version"], document["kind"]) == (SCHEMA_VERSION, kind)
        assert (result.exit_code, result.stderr) == (0, "")
    assert document["difference"]["parts_ms"].keys() >= {"GEMMs", "casts", "idle"}
    assert document["speedup"]["low"] < document["speedup"]["value"] < document["speedup"]["high"]
    shown, verbose = (fp8doctor("trace", trace, *option).stdout for option in ((), ("-v",)))
    assert verbose != shown
