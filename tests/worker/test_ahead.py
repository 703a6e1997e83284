"""Helpers compile what they are told, end when they are told, and cost nothing when they die."""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fp8doctor
from fp8doctor.examine import examine
from fp8doctor.facts import Facts, Target, Workload
from fp8doctor.loading.job import Job
from fp8doctor.loading.model_file import load
from fp8doctor.trial import ahead
from fp8doctor.trial.variant import ArmPlan, as_it_is
from fp8doctor.worker import parent
from fp8doctor.worker.ahead import Helpers
from fp8doctor.worker.request import TrialRequest
from tests.trial.test_conductor import job
from tests.waiting import LONGEST_S, wait_for
from tests.worker.test_trial import MODEL

pytestmark = pytest.mark.slow

SMALL = Job(model=torch.nn.Linear(2, 2), target=Target(), workload=Workload())

ASKED: dict[str, Any] = {"target": "m.py", "layers": None, "batch": None, "seq": None, "trial": None}


def helpers(monkeypatch: pytest.MonkeyPatch, code: str, count: int = 1) -> Helpers:
    """Helpers that run other code."""
    monkeypatch.setattr(sys, "orig_argv", [sys.executable, "-c", f"import json, sys\n{code}", ""])
    return Helpers(ASKED, "cpu", count)


def test_the_arms_are_shared_out_and_named_when_they_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "for arm in json.loads(sys.stdin.read())['arms']: print(arm, flush=True)"
    of = helpers(monkeypatch, code, count=2)
    of.know(Facts(target=Target(kind="file", name="m" * 2**20)))  # more than a pipe holds
    of.begin(["a", "b", "c"])
    wait_for("three arms to be named", lambda: of.done() == {"a", "b", "c"})
    assert of.end()
    assert not of.end()


def test_one_that_dies_or_hangs_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for code in ("sys.exit(1)", "import time; time.sleep(1e6)"):
        of = helpers(monkeypatch, code)
        of.know(Facts(target=Target(kind="file", name="m" * 2**20)))
        of.begin(["a"])
        assert of.end()
        assert of.done() == frozenset()


def test_what_a_helper_started_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers of the compiler have workers of their own."""
    sleep = "import time; time.sleep(1e6)"
    worker = (
        f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {sleep!r}]).pid); {sleep}"
    )
    code = f"import subprocess; subprocess.run([sys.executable, '-uc', {worker!r}])"
    of = helpers(monkeypatch, code)
    wait_for("the worker's own worker", lambda: bool(of.done()))
    (pid,) = of.done()
    assert is_alive(int(pid))
    of.end()
    wait_for("its end", lambda: not is_alive(int(pid)))


def is_alive(pid: int) -> bool:
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def test_one_that_cannot_be_started_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "orig_argv", ["/nowhere/python", ""])
    of = Helpers(ASKED, "cpu", 2)
    of.begin(["a"])
    assert not of.end()


def test_a_trial_on_a_cpu_has_the_cores_for_itself() -> None:
    assert ahead.how_many(SMALL, torch.device("cpu")) == 0


def test_a_large_model_that_nothing_cuts_is_not_loaded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (70, 80))
    monkeypatch.setattr(ahead.os, "sched_getaffinity", lambda pid: set(range(32)))
    with torch.device("meta"):
        large = replace(SMALL, model=torch.nn.Linear(2**16, 2**16))
    assert ahead.how_many(large, torch.device("cuda", 0)) == 0
    cut = replace(large, rebuild=lambda layers: (large.model, None))
    assert ahead.how_many(cut, torch.device("cuda", 0)) == 2


def test_a_file_that_takes_long_to_load_is_not_loaded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may train when it is imported; a function that builds fewer layers does not."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (70, 80))
    monkeypatch.setattr(ahead.os, "sched_getaffinity", lambda pid: set(range(32)))
    gpu = torch.device("cuda", 0)
    assert ahead.how_many(SMALL, gpu, loaded_s=60.0) == 0
    assert ahead.how_many(SMALL, gpu, loaded_s=2.0) == 2
    cut = replace(SMALL, rebuild=lambda layers: (SMALL.model, None))
    assert ahead.how_many(cut, gpu, loaded_s=60.0) == 2


@pytest.mark.parametrize(("free", "cores", "count"), [(70, 16, 1), (70, 32, 2), (70, 6, 0), (40, 32, 0)])
def test_helpers_are_as_many_as_there_is_room_for(
    free: int, cores: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 80))
    monkeypatch.setattr(ahead.os, "sched_getaffinity", lambda pid: set(range(cores)))
    assert ahead.how_many(SMALL, torch.device("cuda", 0)) == count


def test_arms_are_built_at_one_block_and_those_that_fail_are_not_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    blocks: list[int] = []

    def noted(variant: Any) -> Any:
        blocks.append(len(variant.model.blocks))
        return variant

    def failing(variant: Any) -> Any:
        raise ValueError("no kernel")

    plans = [ArmPlan("a", noted), ArmPlan("b", failing), ArmPlan("c", as_it_is)]
    monkeypatch.setattr(ahead, "arms", lambda facts, prescription, of: plans)
    of = job(blocks=26)
    built = ahead.compile_arms(of, examine(of), [], ["b", "a", "unknown", "c"], torch.device("cpu"))
    assert list(built) == ["a", "c"]
    assert blocks == [1]


def test_a_helper_loads_the_target_and_compiles_what_the_trial_plans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.py").write_text(
        MODEL.replace("{compile}", "super().compile(*arguments, backend='eager')")
    )
    target = str(tmp_path / "model.py")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", [*sys.argv])
    facts = examine(load(target))
    package = str(Path(fp8doctor.__file__).resolve())
    monkeypatch.setattr(sys, "orig_argv", [sys.executable, "-P", "-c", parent._BOOT, package, "{}", ""])
    trial = {"budget_s": 60.0, "device": "cpu", "select": (), "ignore": (), "checks": (), "trace": None}
    assert TrialRequest(**trial)
    of = Helpers({**ASKED, "target": target, "trial": trial}, "cpu", 1)
    of.know(facts)
    of.begin(["float8_rowwise", "float8_tensorwise"])
    (process,) = of._processes
    assert process.wait(LONGEST_S) == 0
    wait_for("what it printed last", lambda: of.done() == {"float8_rowwise", "float8_tensorwise"}, 60.0)
