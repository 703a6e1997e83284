"""``fp8doctor trace`` and ``fp8doctor compare``: arguments, exit codes, files, formats."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from fp8doctor import cli
from tests.profiling.composed import Composed

ROOT = Path(__file__).resolve().parents[1]
RECORDED = ROOT / "tests" / "patients" / "recorded"
EAGER, COMPILED = RECORDED / "h200-decoder_468m.json.gz", RECORDED / "h200-decoder_468m_compiled.json.gz"
UNTIMED = RECORDED / "h200-moe.json.gz"


def fp8doctor(*args: str | Path) -> Result:
    return CliRunner().invoke(cli.main, [str(arg) for arg in args])


@pytest.fixture
def traces(tmp_path: Path) -> tuple[Path, Path]:
    paths = []
    for name, kernel, ms in (("bf16.json", "nvjet_sm90_tst_1", 100), ("fp8.json", "nvjet_sm90_qqtst_1", 60)):
        trace = Composed()
        for number in range(2):
            begin = 100_000 * number
            trace.add("user_annotation", f"ProfilerStep#{number}", begin, begin + 100_000, 10)
            trace.kernel(kernel, begin + 10, begin + 10 + 1000 * ms, launched=begin + 5)
        paths.append(trace.write(tmp_path, name))
    return paths[0], paths[1]


def test_json_is_one_document(traces: tuple[Path, Path]) -> None:
    for args, kind in ((("trace", traces[1]), "traces"), (("compare", EAGER, COMPILED), "comparison")):
        result = fp8doctor(*args, "--format", "json")
        document = json.loads(result.stdout)
        assert (document["schema_version"], document["kind"]) == (2, kind)
        assert (result.exit_code, result.stderr) == (0, "")
    assert document["difference"]["parts_ms"].keys() >= {"GEMMs", "casts", "idle"}
    assert document["speedup"]["low"] < document["speedup"]["median"] < document["speedup"]["high"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("suffix", "begins"),
    [(".md", "## fp8doctor"), (".html", "<!DOCTYPE html>"), (".txt", "fp8doctor"), (".json", "{")],
)
def test_the_suffix_of_the_file_says_how(
    suffix: str, begins: str, traces: tuple[Path, Path], tmp_path: Path
) -> None:
    for args in (("trace", traces[0]), ("compare", EAGER, COMPILED)):
        output = tmp_path / f"page{suffix}"
        assert fp8doctor(*args, "-o", output).stdout == ""
        assert output.read_text("utf-8").startswith(begins)


def test_verbose_shows_every_kernel(traces: tuple[Path, Path]) -> None:
    assert "all work" in fp8doctor("trace", traces[0], "-v").stdout


def test_what_is_read_is_never_written_over(traces: tuple[Path, Path], tmp_path: Path) -> None:
    before = traces[1].read_bytes()
    result = fp8doctor("trace", traces[1], "-o", traces[1])
    assert result.exit_code == 2
    assert "would overwrite" in result.stderr
    assert traces[1].read_bytes() == before
    assert fp8doctor("compare", EAGER, COMPILED, "-o", tmp_path / "a.tar").exit_code == 2


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "No such file or directory"),
        (b"", "the trace is empty"),
        (b"{}", "not a trace of torch.profiler"),
        (b'{"traceEvents": [{"cat": "kernel", "na', "the trace is not JSON"),
        (b"\x1f\x8b\x08\x00", "the trace cannot be read"),
    ],
)
def test_a_bad_trace_is_a_users_mistake_in_one_sentence(
    content: bytes | None, sentence: str, tmp_path: Path
) -> None:
    path = tmp_path / "bad.json"
    if content is not None:
        path.write_bytes(content)
    result = fp8doctor("trace", path)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("fp8doctor: cannot read")
    assert sentence in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "No such file"),
        (b"", "it is not JSON"),
        (b"[" * 100_000, "nested too deep"),
        (b'{"traceEvents": []}', "not a report"),
        (b'{"schema_version": 99, "facts": {}}', "written by a newer fp8doctor"),
    ],
)
def test_a_bad_report_is_a_users_mistake_in_one_sentence(
    content: bytes | None, sentence: str, tmp_path: Path
) -> None:
    path = tmp_path / "bad.json"
    if content is not None:
        path.write_bytes(content)
    for args in ((EAGER, path), (path, EAGER)):
        result = fp8doctor("compare", *args)
        assert result.exit_code == 2
        assert sentence in result.stderr
        assert result.stderr.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reports", "least", "code"),
    [
        ((EAGER, COMPILED), "4.0", 0),
        ((EAGER, COMPILED), "4.1", 1),
        ((COMPILED, EAGER), "1", 1),
        ((UNTIMED, EAGER), "0.1", 2),
        ((UNTIMED, EAGER), None, 0),
        ((EAGER, EAGER), None, 0),
        ((EAGER, COMPILED), "nan", 2),
    ],
)
def test_the_speedup_that_is_asked_for_decides_the_exit_code(
    reports: tuple[Path, Path], least: str | None, code: int
) -> None:
    assert fp8doctor("compare", *reports, *(("--min-speedup", least) if least else ())).exit_code == code


@pytest.mark.parametrize("args", [("trace",), ("compare", "a.json"), ("trace", "a", "b")])
def test_wrong_usage(args: tuple[str, ...]) -> None:
    assert fp8doctor(*args).exit_code == 2


@pytest.mark.slow
def test_neither_command_imports_torch(traces: tuple[Path, Path]) -> None:
    code = (
        "import sys\nfrom fp8doctor import cli\n"
        "for args in (['trace', sys.argv[1]], ['compare', *sys.argv[3:5]]):\n"
        "    try:\n        cli.main(args)\n    except SystemExit as end:\n        assert end.code == 0, end\n"
        "assert 'torch' not in sys.modules\n"
    )
    command = [sys.executable, "-c", code, *traces, EAGER, COMPILED]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
