"""The command line in this process, with a stand-in for its worker, and in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from click.testing import CliRunner, Result
from msgspec.structs import replace

from fp8doctor import cli
from fp8doctor.facts import Arm, Facts, Trial
from fp8doctor.stages import Doing
from fp8doctor.worker.parent import Examination, Printed
from tests.facts_of import DECODER_468M
from tests.waiting import LONGEST_S

ROOT = Path(__file__).resolve().parents[2]


class Worker:
    """Stands in for `fp8doctor.worker.parent`: remembers what it was asked, answers with ready facts."""

    Examination, Printed = Examination, Printed

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.facts: Facts = DECODER_468M
        self.problem: str | None = None
        self.error: BaseException | None = None
        self.doing = [Doing("loading the model")]
        self.prints = b""

    def examine_in_worker(
        self, target: str | None, *, progress: Any, printed: Printed, **options: Any
    ) -> SimpleNamespace:
        self.asked.append({"target": target, **options})
        for doing in self.doing:
            progress(doing)
        os.write(printed.file.fileno(), self.prints)
        printed.limit()
        if self.error:
            raise self.error
        return SimpleNamespace(facts=self.facts, problem=self.problem)


def timed(as_is_ms: float) -> Facts:
    arms = tuple(
        Arm(name=name, tried=True, reason=None, step_ms=ms, rounds_ms=(ms,) * 6)
        for name, ms in (("as_is", as_is_ms), ("bf16", 100.0))
    )
    return replace(
        DECODER_468M, trial=Trial(device="cuda", gpu="NVIDIA H200", blocks={}, arms=arms, reliable=True)
    )


def fp8doctor(*args: str | Path) -> Result:
    return CliRunner().invoke(cli.main, [str(arg) for arg in args])


def process(*args: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-m", "fp8doctor", *map(str, args)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=LONGEST_S,
        check=False,
        **options,
    )


TRACEBACK = """Traceback (most recent call last):
  File "/home/somebody/train.py", line 9, in <module>
    login(token="hf_AbCdEfGhIjKlMnOpQrStUvWxYz0123456789")
RuntimeError: Expected trailing dimension of mat1 to be divisible by 16 but got mat1 shape: (1003x1000).
"""
