"""Files that fp8doctor writes: whole or not at all, and never over what it reads."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from fp8doctor import cli
from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.errors import UserError
from fp8doctor.files import write_text
from fp8doctor.report import Report
from tests.facts_of import DECODER_468M

ROOT = Path(__file__).parents[1]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "saved.json"
    Report.of(diagnose(DECODER_468M)).save(path)
    return path


def fp8doctor(*args: str | Path) -> Result:
    return CliRunner().invoke(cli.main, [str(arg) for arg in args])


def limited_to(size: int) -> None:
    """Let no file grow beyond so many bytes: the write fails as on a full disk."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def test_a_file_is_written_and_written_again(tmp_path: Path) -> None:
    path = tmp_path / "report.txt"
    write_text(path, "∆ first")
    write_text(path, "second")
    assert path.read_text(encoding="utf-8") == "second"
    assert os.listdir(tmp_path) == ["report.txt"]


def test_a_write_that_fails_leaves_the_old_file_and_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "report.txt"
    path.write_text("old")
    code = (
        "import sys; from pathlib import Path; from fp8doctor.files import write_text\n"
        "from fp8doctor.errors import UserError\n"
        "try: write_text(Path(sys.argv[1]), 'x' * 100_000)\n"
        "except UserError as error: print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        preexec_fn=lambda: limited_to(50_000),
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    assert done.stdout == f"cannot write {path}: File too large\n"
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["report.txt"]


def test_a_killed_process_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "report.txt"
    path.write_text("old")
    code = (
        "import os, signal, sys; from pathlib import Path; from fp8doctor.files import write_text\n"
        "sys.setprofile(lambda frame, event, what: event == 'c_return' and what.__name__ == 'write'\n"
        "               and os.kill(os.getpid(), signal.SIGKILL))\n"
        "write_text(Path(sys.argv[1]), 'x' * 10_000_000)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
        timeout=600,
    )
    assert done.returncode == -9
    assert path.read_text() == "old"


def test_permissions_of_a_file_stay_and_those_of_a_new_one_are_the_umasks(tmp_path: Path) -> None:
    old, new, plain = tmp_path / "old", tmp_path / "new", tmp_path / "plain"
    old.write_text("")
    old.chmod(0o640)
    plain.write_text("")
    write_text(old, "text")
    write_text(new, "text")
    assert old.stat().st_mode == 0o100640
    assert new.stat().st_mode == plain.stat().st_mode


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "real").write_text("old")
    write_text(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "new"


def test_what_is_no_regular_file_is_written_to(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_text(pipe, "text")
    assert os.read(reader, 99) == b"text"
    os.close(reader)


def test_a_link_that_leads_to_itself_stays(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("other")
    (tmp_path / "other").symlink_to("link")
    with pytest.raises(UserError, match="lead back to it"):
        write_text(tmp_path / "link", "text")
    assert (tmp_path / "link").is_symlink()


@pytest.mark.parametrize(
    "command", [("health",), ("report",), ("trace",), ("fix",), ("plan", "--gpu", "H100")]
)
def test_no_command_waits_for_a_pipe(command: tuple[str, ...], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    result = fp8doctor(*command, tmp_path / "pipe.json")
    assert (result.exit_code, result.stdout, len(result.stderr.splitlines())) == (2, "", 1)


def test_a_folder_that_is_not_there_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot write .*: No such file or directory"):
        write_text(tmp_path / "none" / "report.txt", "")


@pytest.mark.slow
@pytest.mark.parametrize("option", ["-o", "--save"])
def test_a_report_does_not_replace_the_one_it_reads(option: str, saved: Path) -> None:
    before = saved.read_bytes()
    result = fp8doctor("report", saved, option, saved.parent / "." / saved.name)
    assert result.exit_code == 2
    assert result.stderr == f"fp8doctor: {option} would overwrite {saved}, which is read; name another file\n"
    assert saved.read_bytes() == before


@pytest.mark.parametrize("option", ["-o", "--save", "--trace"])
@pytest.mark.parametrize("target", ["model.py", "./model.py:build_model", "link.py"])
def test_nothing_replaces_the_model_file(
    option: str, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text("raise AssertionError('run')")
    Path("link.py").symlink_to("model.py")
    result = fp8doctor(target, "--format", "text", option, tmp_path / "model.py")
    assert result.exit_code == 2
    assert result.stderr == (
        f"fp8doctor: {option} would overwrite {tmp_path / 'model.py'}, which is read; name another file\n"
    )
    assert Path("model.py").read_text() == "raise AssertionError('run')"


@pytest.mark.parametrize("command", [("demo",), ("env",)])
def test_two_options_do_not_name_one_file(
    command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = fp8doctor(*command, "-o", "r.json", "--save", tmp_path / "r.json")
    assert result.exit_code == 2
    assert result.stderr == "fp8doctor: -o and --save name one file, r.json; name two\n"
    assert not os.listdir(tmp_path)


def test_a_trace_and_a_report_are_two_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text("raise AssertionError('run')")
    result = fp8doctor("model.py", "--save", "r.json", "--trace", "r.json")
    assert result.exit_code == 2
    assert result.stderr == "fp8doctor: --save and --trace name one file, r.json; name two\n"
