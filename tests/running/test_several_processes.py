"""Jobs of several processes under ``fp8doctor run``: each rank is as without it, and rank 0 tells of all."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from fp8doctor.facts import Facts
from tests.running.test_script import ROOT, TIMEOUT_S, environment, script

pytestmark = pytest.mark.slow

Ended = tuple[int, str, str]
"""Exit code, stdout, stderr of a rank."""

OPTIONS = ("-m", "fp8doctor", "run", "--steps", "4", "--warmup", "2")


def ranks(arguments: list[str], folder: Path, before: tuple[str, ...] = OPTIONS) -> list[Ended]:
    """Start two ranks as a launcher does, without the launcher, which imports torch."""
    job = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": uuid.uuid4().hex}
    processes = [
        subprocess.Popen(
            [sys.executable, *before, *arguments],
            cwd=folder,
            env=environment(**job, RANK=str(rank), LOCAL_RANK=str(rank)),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    ended = []
    for each in processes:
        out, err = each.communicate(timeout=TIMEOUT_S)
        ended.append((each.returncode, out, err))
    return ended


def test_a_rank_that_raises_is_named_by_rank_0_alone(tmp_path: Path) -> None:
    text = "import os\nprint(os.environ['RANK'])\nassert os.environ['RANK'] == '0', 'planted'\n"
    zero, one = ranks(script(tmp_path, text), tmp_path)
    assert (zero[0], zero[1], one[0], one[1]) == (0, "0\n", 1, "1\n")
    assert "fp8doctor: rank 1 of 2 failed first: AssertionError: planted\n" in zero[2]
    assert "fp8doctor:" not in one[2]


def test_a_rank_that_is_killed(tmp_path: Path) -> None:
    text = "import os, signal\nif os.environ['RANK'] == '1':\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    zero, one = ranks(script(tmp_path, text), tmp_path)
    assert (zero[0], one[0]) == (0, -signal.SIGKILL)
    assert "rank 1 of 2 ended first, without Python's own end" in zero[2]


def test_a_rank_0_that_raises_ends_at_once(tmp_path: Path) -> None:
    """The launcher ends the others only when it has; until then rank 1 waits."""
    text = (
        "import os, pathlib, time\nif os.environ['RANK'] == '0':\n    raise SystemError('planted')\n"
        "while not pathlib.Path('ended').exists():\n    time.sleep(0.05)\n"
    )
    job = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": uuid.uuid4().hex}
    arguments = [sys.executable, *OPTIONS, *script(tmp_path, text)]
    zero, one = (
        subprocess.Popen(
            arguments, cwd=tmp_path, env=environment(**job, RANK=rank), stderr=subprocess.PIPE, text=True
        )
        for rank in ("0", "1")
    )
    assert zero.wait(TIMEOUT_S) == 1
    (tmp_path / "ended").touch()
    assert one.wait(TIMEOUT_S) == 0
    assert "rank 0 of 2 failed first: SystemError: planted" in zero.communicate(timeout=TIMEOUT_S)[1]
    one.communicate(timeout=TIMEOUT_S)


def test_stop_is_refused(tmp_path: Path) -> None:
    for code, _, err in ranks(["--stop", *script(tmp_path, "print(1)")], tmp_path):
        assert code == 2
        assert "--stop is for one process, and a launcher started 2" in err


def test_ddp_with_float8_and_a_slow_rank(tmp_path: Path) -> None:
    """Losses, weights and random numbers are the same bits; the slow rank is named with its times."""
    job = [str(ROOT / "tests" / "running" / "ranks" / "job.py")]
    job += "--width 32 --rows 16 --blocks 2 --steps 12 --slow 0.5".split()
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    plain = together([sys.executable, "-c", FORKED, *job], tmp_path)
    save = ["--save", "report.json"]
    watched = together([*launcher, *OPTIONS, *save, *job], tmp_path)
    assert plain[0] == watched[0] == 0, plain[2] + watched[2]
    assert sorted(plain[1].splitlines()) == sorted(watched[1].splitlines())
    assert watched[1].count("weights") == 2
    saved = json.loads((tmp_path / "report.json").read_text())
    assert watched[2].count("\nrank 0: ") == watched[2].count("\nrank 1: ") == 1
    slow = next(each["evidence"] for each in saved["findings"] if each["code"] == "DST004")
    assert (slow["rank"], slow["part"]) == (1, "before its forward")
    assert slow["own_ms"] >= 500
    facts = Facts.from_dict(saved["facts"])
    assert [(each.rank, each.end, each.steps) for each in facts.ranks.processes] == [
        (0, "ended", 12),
        (1, "ended", 12),
    ]
    distributed = facts.training.distributed
    assert distributed is not None
    assert (distributed.wrapper, distributed.backend, distributed.world_size) == ("DDP", "gloo", 2)
    assert len(facts.linears()) == 4


FORKED = """
import os, runpy, socket, sys
import torch, torchao.float8
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
os.environ.update(WORLD_SIZE="2", LOCAL_RANK="0", RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
child = os.fork()
if not child:
    os.environ.update(LOCAL_RANK="1", RANK="1")
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
if child:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
"""Two ranks without fp8doctor that import torch once."""


def together(command: list[str], folder: Path) -> Ended:
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment(OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        timeout=2 * TIMEOUT_S,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr
