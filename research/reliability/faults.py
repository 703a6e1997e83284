"""Faults of the machine and of the user's file: no traceback of ours, no torn file, no process left."""

from __future__ import annotations

import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from research.reliability.count import Count

ROOT = Path(__file__).parents[2]

OURS = re.compile(r'internal error|File "[^"]*/fp8doctor/(?!demo)')
"""What fp8doctor says of itself only when it made a mistake."""

CODES = (0, 1, 2, 130, -signal.SIGINT, -signal.SIGTERM, -signal.SIGKILL)

MARK = "FP8DOCTOR_KIT"
"""A variable by which the processes of one attempt are known."""

DEADLINE_S, PATIENCE_S = 180.0, 60.0
"""Seconds that a command, and what it started, may take to end. Conventions of this kit."""

MODEL = "from torch import nn\nmodel = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))\n"

LOOK = "fp8doctor model.py --no-trial -q --fail-on never --save kept.json"


@dataclass(frozen=True)
class Fault:
    """One command under one fault."""

    command: str
    model: str | None = None
    """What model.py says."""
    checks: str | None = None
    """What the one file in the folder ``checks`` says."""
    signal: signal.Signals | None = None
    """Sent at a random moment."""
    to: str = "parent"
    most_bytes: int | None = None
    """Of any file, as on a full disk."""
    prepare: Callable[[Path], object] = lambda folder: None


def hostile(start: str, end: str = "") -> Fault:
    """A model file that does something before or after the model is there."""
    return Fault(LOOK, model=start + MODEL + end)


def check_that(deed: str) -> Fault:
    """A check of the user's that does something when it is imported."""
    return Fault("fp8doctor demo -q --fail-on never --checks checks --save kept.json", checks=deed)


def stopped(number: signal.Signals, to: str = "parent", command: str = LOOK) -> Fault:
    return Fault(f"exec {command}", model="import time\n" + MODEL + "time.sleep(1)\n", signal=number, to=to)


DEMO = "fp8doctor demo -q --fail-on never --save kept.json"

FAULTS: dict[str, Fault] = {
    "stdout closed": Fault(f"{DEMO} >&-"),
    "stdout full": Fault(f"{DEMO} >/dev/full"),
    "stderr closed": Fault(f"{DEMO} 2>&-"),
    "stderr full": Fault(f"{DEMO} 2>/dev/full"),
    "stdin closed": Fault(f"{DEMO} <&-"),
    "all streams closed": Fault(f"{DEMO} <&- >&- 2>&-"),
    "a reader that leaves": Fault(f"{DEMO} | head -c 1"),
    "list to a full disk": Fault("fp8doctor list >/dev/full"),
    "the help to a closed stdout": Fault("fp8doctor --help >&-"),
    "the disk is full": Fault(DEMO, most_bytes=50_000),
    "the disk is full from the first byte": Fault("fp8doctor demo -o kept.md", most_bytes=0),
    "saved to a full device": Fault("fp8doctor demo --save /dev/full"),
    "saved to a pipe": Fault(
        "fp8doctor demo -q --save pipe & cat pipe >/dev/null; wait $!",
        prepare=lambda at: os.mkfifo(at / "pipe"),
    ),
    "saved to a link into nowhere": Fault(
        "fp8doctor demo --save link", prepare=lambda at: (at / "link").symlink_to("no/where")
    ),
    "saved to a circle of links": Fault(
        "fp8doctor demo --save link", prepare=lambda at: (at / "link").symlink_to("link")
    ),
    "a pipe as a report": Fault("fp8doctor report pipe", prepare=lambda at: os.mkfifo(at / "pipe")),
    "a device without an end as a report": Fault("fp8doctor report /dev/zero"),
    "a folder as a report": Fault("fp8doctor report ."),
    "a report that is no text": Fault(
        "fp8doctor report noise", prepare=lambda at: (at / "noise").write_bytes(os.urandom(9999))
    ),
    "few files at once": Fault(f"ulimit -n 24; {DEMO}"),
    "a folder that is gone": Fault("mkdir gone; cd gone; rmdir ../gone; fp8doctor demo -q --fail-on never"),
    "a home that is gone": Fault(f"HOME=/nowhere TMPDIR=/nowhere {DEMO}"),
    "an encoding without letters": Fault(f"PYTHONIOENCODING=ascii LC_ALL=C {DEMO}"),
    "a check that exits": check_that("import sys; sys.exit(0)"),
    "a check that raises a BaseException": check_that("raise BaseException('mine')"),
    "a check that prints": check_that("print('mine' * 1_000_000)"),
    "a check that is no Python": check_that("\0"),
    "Ctrl-C": stopped(signal.SIGINT, command=DEMO),
    "Ctrl-C with a model": stopped(signal.SIGINT),
    "SIGTERM": stopped(signal.SIGTERM),
    "SIGKILL": stopped(signal.SIGKILL),
    "SIGKILL while it saves": stopped(signal.SIGKILL, command=DEMO),
    "SIGKILL of the worker": stopped(signal.SIGKILL, to="worker"),
    "SIGTERM of the worker": stopped(signal.SIGTERM, to="worker"),
    "SIGINT of the worker": stopped(signal.SIGINT, to="worker"),
    "a model file that forks": hostile("import os\nos.fork()\n"),
    "one that leaves a process": hostile("import subprocess\nsubprocess.Popen(['sleep', '600'])\n"),
    "one that leaves a thread": hostile(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(600,)).start()\n"
    ),
    "one that exits": hostile("import sys\nsys.exit(0)\n"),
    "one that exits at once": hostile("import os\nos._exit(0)\n"),
    "one that is interrupted": hostile("raise KeyboardInterrupt\n"),
    "one that raises a BaseException": hostile("raise BaseException('mine')\n"),
    "one that raises a long message": hostile("raise ValueError('x' * 50_000_000)\n"),
    "one that never ends to recurse": hostile("def f(): f()\nf()\n"),
    "one that prints megabytes": hostile(
        "import sys\nprint('x' * 20_000_000)\nprint('y' * 20_000_000, file=sys.stderr)\n"
    ),
    "one that changes the folder": hostile("import os\nos.chdir('/')\n"),
    "one that closes everything": hostile("import os, torch\nos.closerange(0, 4096)\n"),
    "one that takes the streams away": hostile("import sys\nsys.stdout = sys.stderr = sys.stdin = None\n"),
    "one that clears the environment": hostile("import os\nos.environ.clear()\n"),
    "one that clears sys.path": hostile("import sys, torch\nsys.path.clear()\n"),
    "one that forbids files": hostile(
        "import resource, torch\nresource.setrlimit(resource.RLIMIT_NOFILE, (8, 8))\n"
    ),
    "one that deletes itself": hostile("import os\nos.remove('model.py')\n"),
    "one that ignores signals": hostile(
        "import signal\nfor each in (2, 13, 15): signal.signal(each, signal.SIG_IGN)\n"
    ),
    "one that sets an alarm": hostile(
        "import signal, torch\nsignal.alarm(1)\n", "import time\ntime.sleep(3)\n"
    ),
    "one that spoils json": hostile("import json\njson.dumps = json.loads = None\n"),
    "one that is no Python": Fault(LOOK, model="def ("),
    "one with a null byte": Fault(LOOK, model="x = 1\0"),
    "one without a model": Fault(LOOK, model="x = 1"),
    "one whose model lies": hostile("", "type(model).__class__ = property(lambda self: 1 / 0)\n"),
}

CHEAP = (
    "stdout closed",
    "the disk is full",
    "a device without an end as a report",
    "a check that exits",
    "Ctrl-C",
)
"""Those that need no torch and half a second, for every run of the tests."""


def faults(names: list[str], folder: Path, times: int = 1, seed: int = 0) -> Count:
    """Each fault so many times; those with a signal at another moment each time."""
    count, how = Count("a kind of fault"), random.Random(seed)
    for name in names:
        with count.attempt(name) as why:
            for time_ in range(times if FAULTS[name].signal else 1):
                at = folder / f"{name.replace(' ', '-')}-{time_}"
                at.mkdir()
                why += carried_out(FAULTS[name], at, how)
    return count


def carried_out(fault: Fault, folder: Path, how: random.Random) -> list[str]:
    """Run one command under its fault; what is wrong with its end."""
    mark = f"{os.getpid()}-{how.getrandbits(60)}"
    if fault.model is not None:
        (folder / "model.py").write_text(fault.model)
    if fault.checks is not None:
        (folder / "checks").mkdir()
        (folder / "checks" / "mine.py").write_text(fault.checks)
    fault.prepare(folder)
    (folder / "kept.json").write_text("{}")
    process = subprocess.Popen(
        shell_of(fault),
        cwd=folder,
        env={**os.environ, MARK: mark, "PYTHONPATH": str(ROOT), "PYTHON": sys.executable},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: limited(fault),
    )
    if fault.signal is not None:
        stop(process, fault, mark, how)
    try:
        output = b"".join(process.communicate(timeout=DEADLINE_S))
    except subprocess.TimeoutExpired:
        process.kill()
        output = b"".join(process.communicate(timeout=3600))
        return [f"it did not end in {DEADLINE_S} s"]
    finally:
        left = alive(mark, PATIENCE_S)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
    return [
        *wrong_with(process.returncode, output.decode(errors="replace"), folder),
        *(["a process is left"] if left else []),
    ]


def shell_of(fault: Fault) -> list[str]:
    """The command of a fault for the shell, in which ``fp8doctor`` is this one."""
    return ["sh", "-c", fault.command.replace("fp8doctor ", '"$PYTHON" -m fp8doctor ')]


def limited(fault: Fault) -> None:
    """In the process that is started: signals as in a terminal, and files no larger than the fault allows."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if fault.most_bytes is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (fault.most_bytes, fault.most_bytes))


def stop(process: subprocess.Popen[bytes], fault: Fault, mark: str, how: random.Random) -> None:
    """Send the signal of a fault at a random moment, to the command or to its worker."""
    if fault.to == "worker":
        until = time.monotonic() + 60
        workers: list[int] = []
        while not workers and process.poll() is None and time.monotonic() < until:
            workers = [pid for pid in alive(mark) if pid != process.pid]
            time.sleep(0.02)
        time.sleep(how.uniform(0, 2))
        targets = workers[:1]
    else:
        time.sleep(how.uniform(0, 1.5 if "demo" in fault.command else 6))
        targets = [process.pid]
    for pid in targets:
        if Path(f"/proc/{pid}").exists() and process.poll() is None:
            os.kill(pid, fault.signal or signal.SIGKILL)


def alive(mark: str, wait_s: float = 0) -> list[int]:
    """Processes of an attempt that run, after waiting for their end."""
    until = time.monotonic() + wait_s
    while True:
        found = [
            int(each.name) for each in Path("/proc").iterdir() if each.name.isdigit() and is_of(each, mark)
        ]
        if not found or time.monotonic() >= until:
            return found
        time.sleep(0.05)


def is_of(process: Path, mark: str) -> bool:
    try:
        ended = (process / "stat").read_text().rpartition(")")[2].split()[0] in "ZX"
        return not ended and f"{MARK}={mark}".encode() in (process / "environ").read_bytes().split(b"\0")
    except OSError:
        return False


def wrong_with(code: int, said: str, folder: Path) -> list[str]:
    """What is wrong with the end of a command."""
    why = [] if code in CODES else [f"exit code {code}"]
    if found := OURS.search(said):
        why.append(said[max(0, found.start() - 100) : found.start() + 300])
    try:
        json.loads((folder / "kept.json").read_text("utf-8"))
    except ValueError:
        why.append("kept.json is torn")
    beside = [path.name for path in folder.rglob(".fp8doctor-*")]
    if beside and code not in (-signal.SIGKILL, -signal.SIGTERM):
        why.append(f"{beside[0]} is left")
    return why
