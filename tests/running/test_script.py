"""A script under ``fp8doctor run`` beside the same script under Python: it cannot tell the difference.

None of these scripts imports torch, so that a pair of runs takes a second.
"""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from fp8doctor import cli
from fp8doctor.running.launch import checked_script, interpreter_options
from tests.waiting import LONGEST_S

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = LONGEST_S

PROBE = """
import json, multiprocessing, os, pickle, sys, atexit

class Thing:
    pass

def square(x):
    return x * x

def main():
    main_module = sys.modules["__main__"]
    seen = {
        "argv": sys.argv,
        "orig_argv": sys.orig_argv,
        "path": sys.path,
        "name": __name__,
        "file": __file__,
        "spec": getattr(__spec__, "name", None),
        "cached": __cached__,
        "package": __package__,
        "loader": type(__loader__).__name__,
        "builtins": type(__builtins__).__name__,
        "names": sorted(vars(main_module)),
        "environment": dict(os.environ),
        "flags": list(sys.flags),
        "finders": [each.split(" object")[0] for each in map(repr, sys.meta_path) if "fp8doctor" not in each],
        "first_file": os.open(os.devnull, os.O_RDONLY),
        "stdin": sys.stdin.read(),
        "pickled": type(pickle.loads(pickle.dumps(Thing()))) is Thing,
        "session": os.getsid(0),
        "parent": os.getppid(),
        "sitecustomize": "sitecustomize" in sys.modules,
    }
    for method in ("fork", "spawn"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            seen[method] = pool.map(square, [3])
    try:
        os.waitpid(-1, os.WNOHANG)
        seen["children"] = True
    except ChildProcessError:
        seen["children"] = False
    print(json.dumps(seen))

if __name__ == "__main__":
    main()
"""


def environment(**variables: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    return {**kept, "PYTHONPATH": str(ROOT), **variables}


def started(arguments: list[str], folder: Path, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=folder,
        env=options.pop("env", environment()),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=_takes_interrupts,
        **options,
    )


def _takes_interrupts() -> None:
    """Undo what a shell's background job and nohup set: their processes ignore these signals."""
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def run(arguments: list[str], folder: Path, stdin: str = "", **options: Any) -> tuple[int, str, str]:
    process = started(arguments, folder, stdin=subprocess.PIPE, **options)
    out, err = process.communicate(stdin, timeout=TIMEOUT_S)
    return process.returncode, out, err


def script(folder: Path, text: str, name: str = "train.py") -> list[str]:
    (folder / name).write_text(textwrap.dedent(text))
    return [name]


def both(arguments: list[str], folder: Path, *ours: str, **options: Any) -> tuple[Any, Any]:
    plain = run(arguments, folder, **options)
    return plain, run(["-m", "fp8doctor", "run", *ours, *arguments], folder, **options)


def without_ours(stderr: str) -> str:
    return "".join(line for line in stderr.splitlines(True) if not line.startswith("fp8doctor: "))


@pytest.mark.parametrize("gate", [[], ["--fail-on", "error"]])
def test_a_script_sees_what_it_would_see(tmp_path: Path, gate: list[str]) -> None:
    arguments = [*script(tmp_path, PROBE), "--steps", "3", "-m", "x y"]
    (code, out, _), (ours, our_out, our_err) = both(arguments, tmp_path, *gate, stdin="typed")
    assert code == 0, our_err
    expected, seen = json.loads(out), json.loads(our_out)
    if gate:  # fp8doctor waits above the script, and has no report
        expected["parent"] = seen["parent"]
    assert seen == expected
    assert ours == (2 if gate else 0)
    assert "imported no torch" in our_err


def test_a_module_sees_what_it_would_see(tmp_path: Path) -> None:
    (tmp_path / "pkg").mkdir()
    script(tmp_path / "pkg", PROBE)
    (_, out, _), (_, our_out, our_err) = both(["-m", "pkg.train", "--lr", "1"], tmp_path)
    assert json.loads(our_out) == json.loads(out), our_err


STREAMS = """
import os, sys
closed = [each is None for each in (sys.stdin, sys.stdout, sys.stderr)]
files = [number for number in range(64) if os.path.exists(f"/proc/self/fd/{number}")]
print("lost")
with open("seen", "w") as file:
    print(closed, files, file=file)
"""


def test_streams_that_are_closed_are_closed_for_the_script(tmp_path: Path) -> None:
    script(tmp_path, STREAMS)
    seen = []
    for command in (["train.py"], ["-m", "fp8doctor", "run", "train.py"]):
        code, _, err = in_a_shell('exec "$@" <&- >&-', command, tmp_path)
        seen.append((code, (tmp_path / "seen").read_text()))
        assert "Traceback" not in err
    assert seen[1] == seen[0]


def in_a_shell(line: str, command: list[str], folder: Path) -> tuple[int, str, str]:
    shell = ["sh", "-c", line, "sh", sys.executable, *command]
    kept: dict[str, Any] = {"cwd": folder, "env": environment(), "capture_output": True, "text": True}
    done = subprocess.run(shell, check=False, timeout=TIMEOUT_S, **kept)
    return done.returncode, done.stdout, done.stderr


def test_a_sitecustomize_of_the_user_is_imported(tmp_path: Path) -> None:
    ours = tmp_path / "ours"
    ours.mkdir()
    (ours / "sitecustomize.py").write_text("import builtins\nbuiltins.customized = __file__\n")
    arguments = script(tmp_path, "import sitecustomize; print(customized, sitecustomize.__file__)\n")
    env = environment(PYTHONPATH=f"{ours}{os.pathsep}{ROOT}")
    plain, watched = both(arguments, tmp_path, env=env)
    assert plain[:2] == watched[:2]
    assert str(ours) in watched[1]


ENDS = {
    "returns": "print('done')",
    "raises": "def f():\n    raise ValueError('no')\nf()",
    "exits with a sentence": "raise SystemExit('no data')",
    "interrupted": "raise KeyboardInterrupt",
    "os._exit": "import os\nprint('x', flush=True)\nos._exit(7)",
    "killed": "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)",
    "at exit": "import atexit\natexit.register(print, 'bye')\nimport sys\nsys.exit(4)",
    "a thread": "import threading\nthreading.Timer(0.1, print, ('late',)).start()",
    "a daemon": "import os, signal, time\nif not os.fork():\n    os.close(1), os.close(2)\n"
    "    signal.alarm(900)\n    while not os.path.exists('ended'):\n        time.sleep(0.05)",
    "own hook": "import sys\nsys.excepthook = lambda *a: print('mine', a[0].__name__)\n1 / 0",
}

RAISED = {
    "raises": "ValueError: no",
    "interrupted": "KeyboardInterrupt",
    "own hook": "ZeroDivisionError: division by zero",
}
"""Ends of which an exception is told."""


@pytest.mark.gate(
    "returns", "raises", "exits with a sentence", "interrupted", "os._exit", "killed", "a thread", "own hook"
)
@pytest.mark.parametrize("end", ENDS)
def test_it_ends_as_it_would_end(tmp_path: Path, end: str) -> None:
    plain, watched = both(script(tmp_path, ENDS[end]), tmp_path)  # waiting for the daemon fails
    (tmp_path / "ended").touch()
    assert watched[:2] == plain[:2]
    assert without_ours(watched[2]) == plain[2]
    raised = RAISED.get(end)
    told = f"failed before it imported torch: {raised}" if raised else "process imported no torch."
    assert told in watched[2]
    ordinary = end not in ("os._exit", "killed")
    assert ("without Python's own end" not in watched[2]) == ordinary


@pytest.mark.parametrize("end", ["returns", "at exit", "killed"])
def test_it_ends_as_it_would_end_below_a_gate(tmp_path: Path, end: str) -> None:
    plain, watched = both(script(tmp_path, ENDS[end]), tmp_path, "--fail-on", "error")
    assert watched[1] == plain[1]
    assert watched[0] == (plain[0] or 2)


SIGNALLED = """
import signal, sys, time
got = []

def handle(number, frame):
    got.append(number)
    print(number, flush=True)

for name in ("SIGTERM", "SIGINT", "SIGUSR1"):
    signal.signal(getattr(signal, name), handle)
print("ready", flush=True)
while signal.SIGUSR1 not in got:
    time.sleep(0.01)
print(got, flush=True)
sys.exit(5)
"""


@pytest.mark.parametrize("gate", [[], ["--fail-on", "error"]])
def test_signals_reach_the_script_once(tmp_path: Path, gate: list[str]) -> None:
    process = started(
        ["-m", "fp8doctor", "run", *gate, *script(tmp_path, SIGNALLED)], tmp_path, start_new_session=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    numbers = (signal.SIGTERM, signal.SIGINT)
    for number in numbers:
        if gate:
            process.send_signal(number)
        else:
            os.killpg(process.pid, number)  # as torchrun, timeout and a terminal do
        assert process.stdout.readline() == f"{number:d}\n"
    time.sleep(0.3)
    process.send_signal(signal.SIGUSR1)
    out, _ = process.communicate(timeout=TIMEOUT_S)
    assert out == f"{signal.SIGUSR1:d}\n{[*map(int, numbers), int(signal.SIGUSR1)]}\n"
    assert process.returncode == 5


def test_its_process_is_the_one_that_was_started_and_is_interrupted_as_python(tmp_path: Path) -> None:
    arguments = script(tmp_path, "import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(60)\n")
    process = started(["-m", "fp8doctor", "run", *arguments], tmp_path)
    assert process.stdout is not None
    assert int(process.stdout.readline()) == process.pid
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == -signal.SIGINT
    assert "KeyboardInterrupt" in err
    assert "running" not in err


WRONG = {
    "": "no script was named",
    "-m": "no script was named",
    "-o -mx -m": "no script was named",
    "nosuch.py": "no such file: nosuch.py",
    "x" * 5000: "no such file: xxx",  # a name that no file can have
    "--steps 2 train.py": "2 is not in the range x>=3",
    "--save train.py train.py": "would overwrite",
}
"""What follows ``run`` -> what is said of it."""


@pytest.mark.parametrize("line", WRONG)
def test_wrong_usage(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(tmp_path, "print('ran')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "execve", None)  # a script that is run would replace this process
    done = CliRunner().invoke(cli.main, ["run", *line.split()])
    assert done.exit_code == 2
    assert WRONG[line] in done.output


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("python -m fp8doctor", ""),
        ("python -mfp8doctor", ""),
        ("python -m pdb -m fp8doctor", ""),
        ("python /venv/bin/fp8doctor", ""),
        ("python -u /venv/bin/fp8doctor", "-u"),
        ("python -u -m fp8doctor", "-u"),
        ("python -Oum fp8doctor", "-Ou"),
        ("python -X dev -Wignore -W error::Warning -m fp8doctor", "-X dev -Wignore -W error::Warning"),
        ("python -c code", ""),
    ],
)
def test_options_of_the_interpreter_are_kept(command: str, options: str) -> None:
    words = [*command.split(), "run", "a.py", "-u", "-m"]
    assert " ".join(interpreter_options(words)) == options


def test_a_script_from_standard_input() -> None:
    assert checked_script(["-", "--lr", "1"]).arguments == ("-", "--lr", "1")


@pytest.mark.parametrize("name", ["msgspec", "select", "json", "fp8doctor"])
def test_a_name_in_the_scripts_folder_is_the_scripts(name: str, tmp_path: Path) -> None:
    package = tmp_path / "job" / name  # python -m fp8doctor looks for modules in the current folder
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("value = 'mine'\n")
    (package / "inner.py").write_text("value = 'too'\n")
    script(tmp_path / "job", f"import {name}\nfrom {name} import inner\nprint({name}.value, inner.value)\n")
    plain, watched = both(["job/train.py"], tmp_path)
    assert watched[:2] == plain[:2] == (0, "mine too\n")
    assert "internal error" not in watched[2]
