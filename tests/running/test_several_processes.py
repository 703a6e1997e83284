"""Jobs of several processes under ``fp8doctor run``: each rank is as without it, and rank 0 tells of all."""

import json
import re
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest

from fp8doctor.facts import Facts
from tests.programs import printed
from tests.running.forks import BECOME, IMPORTED
from tests.running.test_script import ROOT, TIMEOUT_S, environment, script

pytestmark = pytest.mark.slow

MET = """
import os, pathlib, signal, time
signal.alarm(300)
pathlib.Path(os.environ["RANK"]).touch()
while not (pathlib.Path("0").exists() and pathlib.Path("1").exists()):
    time.sleep(0.02)
"""
"""Both scripts have begun, however long it took; how long a rank waits for another counts from here on. An
alarm ends a script whose other one never comes."""

Ended = tuple[int, str, str]
"""Exit code, stdout, stderr of a rank."""

OPTIONS = ("-m", "fp8doctor", "run", "--steps", "4", "--warmup", "2")


def launched(arguments: list[str], folder: Path) -> list[subprocess.Popen[str]]:
    """Start two ranks as a launcher does, without the launcher, which imports torch."""
    job = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "OMP_NUM_THREADS": "1",
        "TORCHELASTIC_RUN_ID": uuid.uuid4().hex,
    }
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, *OPTIONS, *arguments]
    return [
        subprocess.Popen(command, cwd=folder, env=environment(**job, RANK=rank, LOCAL_RANK=rank), **streams)
        for rank in ("0", "1")
    ]


def ranks(arguments: list[str], folder: Path) -> list[Ended]:
    processes = launched(arguments, folder)
    said = [each.communicate(timeout=TIMEOUT_S) for each in processes]
    return [(each.returncode, *streams) for each, streams in zip(processes, said, strict=True)]


ENDS = {
    "assert os.environ['RANK'] == '0', 'planted'": (
        0,
        1,
        "rank 1 of 2 failed first: AssertionError: planted",
    ),
    "if os.environ['RANK'] == '1': os.kill(os.getpid(), signal.SIGKILL)": (0, -9, "rank 1 of 2 ended first"),
}
"""How rank 1 ends -> exit codes, and what rank 0 alone says."""


@pytest.mark.parametrize("end", ENDS)
def test_a_rank_that_fails_is_named_by_rank_0_alone(end: str, tmp_path: Path) -> None:
    text = f"{MET}print(os.environ['RANK'], flush=True)\n{end}\n"
    zero, one = ranks(script(tmp_path, text), tmp_path)
    assert ((zero[0], one[0]), (zero[1], one[1])) == (ENDS[end][:2], ("0\n", "1\n"))
    assert ENDS[end][2] in zero[2]
    assert "fp8doctor:" not in one[2]


def test_a_rank_0_that_raises_ends_at_once(tmp_path: Path) -> None:
    """The launcher ends the others only when it has; until then rank 1 waits."""
    text = MET + (
        "if os.environ['RANK'] == '0':\n    raise SystemError('planted')\n"
        "while not pathlib.Path('ended').exists():\n    time.sleep(0.05)\n"
    )
    zero, one = launched(script(tmp_path, text), tmp_path)
    assert zero.wait(TIMEOUT_S) == 1
    (tmp_path / "ended").touch()
    assert "rank 0 of 2 failed first: SystemError: planted" in zero.communicate(timeout=TIMEOUT_S)[1]
    one.communicate(timeout=TIMEOUT_S)
    assert one.returncode == 0


JOB = str(ROOT / "research" / "ranks" / "job.py")

JOBS = {
    wrap: f"--wrap {wrap} --width 32 --rows 16 --blocks 2 --steps 10 {more}".split()
    for wrap, more in {"ddp": "--slow 0.5", "fsdp2": ""}.items()
}

RANKS = """
import signal
_, folder, *sys.argv = sys.argv
os.chdir(folder)
os.dup2(os.open("stderr", os.O_WRONLY | os.O_CREAT), 2)
store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
os.environ |= {
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": str(store.port),
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "TORCHELASTIC_RUN_ID": str(store.port),
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
for rank in "01":
    if not os.fork():
        signal.alarm(300)  # seconds
        os.environ["RANK"] = os.environ["LOCAL_RANK"] = rank
        if sys.argv[0] != "fp8doctor":
            runpy.run_path(sys.argv[0], run_name="__main__")
            break
        try:
            main()
        except SystemExit as ended:
            os._exit(ended.code)
else:
    assert [os.wait()[1] for _ in "01"] == [0, 0]
"""
"""Two ranks that meet as a launcher's do, on a port that the system picks: of a script, or of fp8doctor's."""

LAUNCHER = """
_, folder, *sys.argv = sys.argv
os.environ["PYTHONPATH"] = os.getcwd()
os.chdir(folder)
before = os.dup(2)
os.dup2(os.open("stderr", os.O_WRONLY | os.O_CREAT), 2)
try:
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
finally:
    os.dup2(before, 2)
    sys.stderr.write(open("stderr").read())
"""
"""A launcher that is a module, in a folder, in which ``stderr`` holds what is written there."""


def printed_by(program: str, *arguments: str) -> list[str]:
    """Lines of stdout; it fails where the exit code is not 0."""
    return printed(IMPORTED + BECOME + program, *arguments).splitlines()


def watched(wrap: str, folder: Path, launcher: str, *start: str) -> tuple[dict[str, Any], Facts, str]:
    """Findings, facts and stderr of a job under ``run``, which trains to the same bits."""
    job = [JOB, *JOBS[wrap]]
    plain = printed_by(RANKS, str(folder), *job)
    out = printed_by(launcher, str(folder), *start, *OPTIONS[2:], "--save", "report.json", *job)
    err = (folder / "stderr").read_text()
    assert sum(" weights " in line for line in out) == 2, err
    assert sorted(out) == sorted(plain)
    saved = json.loads((folder / "report.json").read_text())
    facts = Facts.from_dict(saved["facts"])
    assert [(each.rank, each.end) for each in facts.ranks.processes] == [(0, "ended"), (1, "ended")]
    assert re.findall(r"(?m)^rank (\d)  ", err) == ["0", "1"]
    assert len(facts.linears()) == 4
    return {each["code"]: each["evidence"] for each in saved["findings"]}, facts, err


def test_ddp_with_float8_and_a_slow_rank(tmp_path: Path) -> None:
    found, facts, _ = watched("ddp", tmp_path, RANKS, "fp8doctor")
    assert (found["DST004"]["rank"], found["DST004"]["part"]) == (1, "before its forward")
    assert found["DST004"]["own_ms"] >= 500
    distributed = facts.training.distributed
    assert distributed is not None
    assert (distributed.wrapper, distributed.backend, distributed.world_size) == ("DDP", "gloo", 2)


def test_fsdp2_with_float8_under_accelerate(tmp_path: Path) -> None:
    """Accelerate starts ranks with torchrun's own code, and each is a process that becomes the script."""
    launcher = "accelerate.commands.launch --multi_gpu --num_processes 2 --main_process_port 0 -m fp8doctor"
    found, facts, err = watched("fsdp2", tmp_path, LAUNCHER, *launcher.split())
    assert found["DST001"]["shards"] == 2
    assert "2 processes (FSDP2, gloo)" in err
    assert facts.training.distributed is not None
    assert facts.training.distributed.wrapper == "FSDP2"


def test_all_ranks_stop_after_the_same_step(tmp_path: Path) -> None:
    """The last one that any of them may watch to: 4 times 2 of warm-up, 4 of the window, 2 for a profile."""
    job = [JOB, *JOBS["fsdp2"], "--steps", "100"]
    start = ["fp8doctor", *OPTIONS[2:], "--stop", "--device", "cpu", "--budget", "1", "--save", "report.json"]
    assert printed_by(RANKS, str(tmp_path), *start, *job) == []
    facts = Facts.from_dict(json.loads((tmp_path / "report.json").read_text())["facts"])
    assert [each.end for each in facts.ranks.processes] == ["ended", "ended"]
    (as_is, *_) = facts.trial.arms
    assert (as_is.name, as_is.tried, facts.trial.harm) == ("as_is", True, ())
    assert "the script was stopped after 14 steps, as --stop asks" in (tmp_path / "stderr").read_text()
