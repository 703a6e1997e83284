"""Whatever user code does in the worker, the parent keeps what it has, names the cause, and leaves nothing
behind."""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

import fp8doctor
from fp8doctor.errors import UserError
from fp8doctor.facts import recorded
from fp8doctor.stages import Doing, Stage
from fp8doctor.worker.parent import Examination, Printed, examine_in_worker
from tests.waiting import LONGEST_S, comes_true, wait_for
from tests.worker.forked import hang, late_while_it_grows

pytestmark = pytest.mark.slow

MODEL = "import torch\nmodel = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))\n"

Examine = Callable[..., Examination]


@pytest.fixture
def examine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forked: None) -> Examine:
    """Examine a model file with this text in a worker, and see that no file, process or descriptor is
    left."""
    monkeypatch.chdir(tmp_path)

    def examine_text(
        text: str,
        *,
        load_timeout: float = LONGEST_S,
        says: list[Doing] | None = None,
        printed: Printed | None = None,
    ) -> Examination:
        (tmp_path / "net.py").write_text(textwrap.dedent(text), encoding="utf-8")
        said = says if says is not None else []
        files, descriptors = set(tmp_path.iterdir()), os.listdir("/proc/self/fd")
        others = children()
        try:
            return examine_in_worker(
                "net.py", load_timeout=load_timeout, progress=said.append, printed=printed
            )
        finally:
            assert {path for path in tmp_path.iterdir() if path.suffix != ".pid"} == files
            assert os.listdir("/proc/self/fd") == descriptors
            assert children() == others

    return examine_text


def children() -> set[str]:
    return {
        pid for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()
    }


def gone(pid: int) -> bool:
    """Whether a process ends; a zombie that nobody reaps has ended."""

    def has_ended() -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except (FileNotFoundError, ProcessLookupError):
            return True

    return comes_true(has_ended)


def assert_only_surroundings(examination: Examination, problem: str) -> None:
    assert examination.problem == problem
    assert examination.facts.gaps["network"] == problem
    assert recorded(examination.facts, "software")
    assert not recorded(examination.facts, "network")
    assert (examination.facts.target.kind, examination.facts.target.name) == ("file", "net.py")


def assert_complete(examination: Examination, linears: int = 2) -> None:
    assert examination.problem is None
    assert len(examination.facts.network.linears) == linears


def test_the_facts_of_a_model(examine: Examine) -> None:
    says: list[Doing] = []
    examination = examine(MODEL, says=says)
    assert_complete(examination)
    assert examination.facts.target.attribute == "model"
    assert examination.facts.workload.tokens == 16384
    assert not recorded(examination.facts, "trial")
    assert says == [
        Doing("reading the environment"),
        Doing("loading net.py", Stage.LOADING),
        Doing("looking at net.py", Stage.LOOKING),
    ]


def test_a_mistake_of_the_user_is_raised_with_the_users_frames(examine: Examine) -> None:
    with pytest.raises(UserError, match=r"build_model\(\) in net.py raised ValueError: \\udc80 no") as caught:
        examine("def build_model():\n    raise ValueError('\\udc80 no')")
    assert "in build_model" in caught.value.detail
    assert f"fp8doctor{os.sep}" not in caught.value.detail
    with pytest.raises(UserError, match=r"build_model\(\) in net.py called sys.exit\(3\)"):
        examine("import sys\ndef build_model(): sys.exit(3)")


STRANGER = """
    import contextlib, os
    for each in range(3, 300):
        with contextlib.suppress(OSError):
            os.write(each, b"hello\\n")
"""
FAILURE_OF_OURS = """
    import fp8doctor.examine.module_facts, torch

    def fail(*arguments):
        raise RuntimeError("not there")

    fp8doctor.examine.module_facts.examine_network = fail
    model = torch.nn.Linear(64, 64)
"""


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("import os\nos._exit(3)", "the worker ended with exit code 3 while loading net.py"),
        (
            "import os\ndef build_model(): os.kill(os.getpid(), 9)",
            "the worker was killed by SIGKILL (out of memory?) while loading net.py",
        ),
        (
            "import os\ndef build_model(): os.kill(os.getpid(), 11)",
            "the worker was killed by SIGSEGV while loading net.py",
        ),
        (
            STRANGER,
            "something other than fp8doctor wrote to its channel while loading net.py, and the worker "
            "was stopped",
        ),
        (FAILURE_OF_OURS, "fp8doctor failed: RuntimeError: not there (net.py:5)"),
    ],
    ids=["exit", "SIGKILL", "SIGSEGV", "a stranger", "our failure"],
)
def test_what_ends_the_worker_is_named(text: str, problem: str, examine: Examine) -> None:
    assert_only_surroundings(examine(text), problem)


def test_a_hang_is_stopped_with_everything_it_started(
    examine: Examine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late_while_it_grows(tmp_path / "hangs.pid", monkeypatch)
    text = f"""
        import os, signal, subprocess
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        open("own.pid", "w").write(str(os.getpid()))
        open("started.pid", "w").write(str(subprocess.Popen(["sleep", "1000"]).pid))
        {hang(tmp_path / "hangs.pid")}
    """
    assert_only_surroundings(
        examine(text, load_timeout=600),
        "loading net.py took longer than 600 s and was stopped; --load-timeout allows it more",
    )
    assert gone(int((tmp_path / "own.pid").read_text()))
    assert gone(int((tmp_path / "started.pid").read_text()))


def test_a_folder_of_a_child_that_is_killed_is_removed(examine: Examine, tmp_path: Path) -> None:
    """A trace of a step lies in one, and may have a hundred megabytes."""
    text = """
        import os, signal
        from pathlib import Path
        from fp8doctor.files import own_folder
        folder = own_folder()
        Path(folder.name, "0.json").write_text("{}")
        open("folder.pid", "w").write(folder.name)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    examine(text)
    folder = Path((tmp_path / "folder.pid").read_text())
    assert folder.name.startswith("fp8doctor-")
    assert not folder.exists()


def test_what_user_code_prints_goes_to_stderr_where_warnings_are_held_back(
    examine: Examine, capfd: pytest.CaptureFixture[str]
) -> None:
    """Held back: warnings of Python, records of loggers, lines of native code and of processes."""
    text = """
        import logging, os, sys, warnings
        warnings.warn("by Python")
        logging.getLogger("library").warning("by a logger")
        os.write(2, b"by native code\\n" * 3)
        os.system("echo by a process >&2")
        print("printed")
        os.write(1, b"written\\n")
        os.system("echo echoed")
        sys.stdout = open(os.devnull, "w")
        sys.stdout.close()
    """
    printed = Printed()
    assert_complete(examine(textwrap.dedent(text) + MODEL, printed=printed))
    assert capfd.readouterr() == ("", "printed\nwritten\nechoed\n")
    lines = printed.counted()
    assert {"by a logger", "by native code (3 times)", "by a process"} <= set(lines)
    assert any(line.endswith("net.py:3: UserWarning: by Python") for line in lines)
    assert not printed.failed


HOSTILE = {
    "takes the number of the channel": """
        import os, torch
        os.closerange(3, 64)
        files = [open(os.devnull, "w") for _ in range(40)]
    """,
    "forks, and leaves a child behind": """
        import os, time
        if os.fork() and os.fork() == 0:
            time.sleep(1000)
    """,
    "does much else": """
        import atexit, json, os, signal, sys, threading, time
        threading.Thread(target=time.sleep, args=(1000,)).start()
        assert sys.stdin.read() == ""
        json.dumps = json.loads = None
        os.chdir("/")
        for each in (signal.SIGTERM, signal.SIGINT, signal.SIGPIPE):
            signal.signal(each, signal.SIG_IGN)
        atexit.register(os._exit, 7)
        sys.argv[:] = []
    """,
}


@pytest.mark.parametrize("start", HOSTILE.values(), ids=HOSTILE)
def test_nothing_user_code_does_breaks_the_protocol(start: str, examine: Examine) -> None:
    assert_complete(examine(textwrap.dedent(start) + "\n" + MODEL))


IN_A_CHECKOUT = f"import sys; sys.path.insert(0, {str(Path(fp8doctor.__file__).resolve().parents[1])!r})\n"


def python(code: str, folder: Path) -> str:
    """What a program prints."""
    command = [sys.executable, "-c", IN_A_CHECKOUT + textwrap.dedent(code)]
    return subprocess.run(
        command, cwd=folder, stdout=subprocess.PIPE, text=True, check=True, timeout=LONGEST_S
    ).stdout


def test_the_parent_imports_no_torch_and_runs_in_a_bare_checkout(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(MODEL)
    code = """
        import sys
        from fp8doctor.worker.parent import examine_in_worker
        examination = examine_in_worker("net.py", progress=lambda text: None)
        assert examination.problem is None, examination.problem
        print("torch" in sys.modules, len(examination.facts.network.linears))
    """
    assert python(code, tmp_path) == "False 2\n"


@pytest.mark.gate("SIGKILL")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=lambda number: number.name)
def test_a_parent_that_is_stopped_takes_the_worker_with_it(number: signal.Signals, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(
        "import os, time\nopen('part', 'w').write(str(os.getpid()))\n"
        "os.rename('part', 'own.pid')\ntime.sleep(1000)"
    )
    code = """
        import signal
        from fp8doctor.worker.parent import examine_in_worker
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
        examine_in_worker("net.py", progress=print)
    """
    command = [sys.executable, "-c", IN_A_CHECKOUT + textwrap.dedent(code)]
    parent = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, stdout=2, text=True)
    pid = tmp_path / "own.pid"
    wait_for("the worker to load the file", pid.exists)
    os.kill(parent.pid, number)
    _, told = parent.communicate(timeout=LONGEST_S)
    assert gone(int(pid.read_text()))
    assert parent.returncode == -number
    assert ("KeyboardInterrupt" in told) == (number is signal.SIGINT)
    with contextlib.suppress(ProcessLookupError):
        os.kill(int(pid.read_text()), signal.SIGKILL)
