"""Files that fp8doctor writes: whole or not at all, and never over what it reads."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.errors import UserError
from fp8doctor.files import write_text
from fp8doctor.report import Report
from tests.cli.command import fp8doctor
from tests.facts_of import DECODER_468M

ROOT = Path(__file__).parents[1]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "saved.json"
    Report.of(diagnose(DECODER_468M)).save(path)
    return path


def test_a_file_is_written_and_written_again(tmp_path: Path) -> None:
    path = tmp_path / "report.txt"
    write_text(path, "∆ first")
    write_text(path, "second")
    assert path.read_text(encoding="utf-8") == "second"
    assert os.listdir(tmp_path) == ["report.txt"]


WRITES = """import os, resource, signal, sys
from pathlib import Path
from fp8doctor.errors import UserError
from fp8doctor.files import write_text
{before}
try: write_text(Path(sys.argv[1]), "x" * 10_000_000)
except UserError as error: print(error)
"""
LIMITED = """signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))"""
"""No file grows beyond so many bytes: the write fails as on a full disk."""
KILLED = """sys.setprofile(lambda frame, event, what: event == "c_return" and what.__name__ == "write"
               and os.kill(os.getpid(), signal.SIGKILL))"""


@pytest.mark.parametrize(("before", "code"), [(LIMITED, 0), (KILLED, -9)], ids=["full disk", "killed"])
def test_a_write_that_does_not_end_leaves_the_old_file(before: str, code: int, tmp_path: Path) -> None:
    path = tmp_path / "report.txt"
    path.write_text("old")
    done = subprocess.run(
        [sys.executable, "-c", WRITES.format(before=before), str(path)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == code
    assert path.read_text() == "old"
    if before == LIMITED:
        assert done.stdout == f"cannot write {path}: File too large\n"
        assert os.listdir(tmp_path) == ["report.txt"]


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


@pytest.fixture
def files(saved: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """A folder with a report, a model file, a link to it and a trace, which is the current one."""
    monkeypatch.chdir(saved.parent)
    Path("model.py").write_text("raise AssertionError('run')")
    Path("link.py").symlink_to("model.py")
    Path("trace.json").write_text('{"traceEvents": []}')
    return {path.name: path.read_bytes() for path in saved.parent.iterdir()}


REFUSED = {
    "report saved.json -o ./saved.json": "saved.json",
    "report saved.json --save saved.json": "saved.json",
    "model.py --format text -o model.py": "model.py",
    "./model.py:build_model --save model.py": "model.py",
    "link.py --save model.py": "model.py",
    "trace trace.json -o trace.json": "trace.json",
    "plan saved.json --gpu H100 -o saved.json": "saved.json",
    "demo -o r.json --save ./r.json": "r.json",
    "env -o r.json --save r.json": "r.json",
}
"""Command line -> the file that the one line of stderr names."""


@pytest.mark.slow
@pytest.mark.parametrize(("line", "named"), REFUSED.items())
def test_what_is_read_or_written_is_not_written_over(line: str, named: str, files: dict[str, bytes]) -> None:
    result = fp8doctor(*line.split())
    assert result.exit_code == 2
    (said,) = result.stderr.splitlines()
    assert named in said
    assert {path.name: path.read_bytes() for path in Path().iterdir()} == files
