"""As many helpers are started as there are cores and memory for, and what they have before they load."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch

from fp8doctor.facts import NOT_RECORDED, Gpu
from fp8doctor.trial import ahead
from fp8doctor.worker.ahead import HELPING, Helpers, most_helpers
from fp8doctor.worker.child import wanted_helpers
from tests.waiting import LONGEST_S, wait_for
from tests.worker.helping import ASKED, CUTS, EVERY, SMALL, WORK, helpers, is_alive, named

pytestmark = pytest.mark.slow


def test_a_trial_on_a_cpu_has_the_cores_for_itself() -> None:
    assert ahead.how_many(SMALL, torch.device("cpu"), 3, shallow=True) == 0


GIB = 2**30


@pytest.mark.parametrize(
    ("weights_gib", "on_gpu", "host_gib", "gpu_gib", "count"),
    [
        (16, False, 512, 141, 3),
        (16, False, 120, 141, 1),
        (16, False, 40, 141, 0),
        (5, True, 120, 141, 3),
        (5, True, 120, 80, 3),
        (7, True, 120, 80, 2),
        (16, True, 512, 80, 1),
        (16, True, 512, 48, 0),
        (5, False, None, 141, 0),
        (4, True, None, 80, 3),
    ],
)
def test_a_model_that_nothing_cuts_is_loaded_again_where_there_is_memory_for_it(
    weights_gib: int,
    on_gpu: bool,
    host_gib: int | None,
    gpu_gib: int,
    count: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0.95 * gpu_gib * GIB, gpu_gib * GIB))
    monkeypatch.setattr(ahead, "free_memory", lambda: host_gib and host_gib * GIB)
    monkeypatch.setattr(ahead, "_on_a_gpu", lambda model: on_gpu)
    with torch.device("meta"):
        large = replace(SMALL, model=torch.nn.Linear(2**14, weights_gib * 2**14, bias=False))
    assert ahead.how_many(large, torch.device("cuda", 0), 3, shallow=False) == count
    assert ahead.how_many(large, torch.device("cuda", 0), 3, shallow=True) == 3


def test_a_file_that_takes_long_to_load_is_not_loaded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may train when it is imported; a function that builds fewer layers does not."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (70, 80))
    gpu = torch.device("cuda", 0)
    assert ahead.how_many(SMALL, gpu, 3, loaded_s=60.0, shallow=False) == 0
    assert ahead.how_many(SMALL, gpu, 3, loaded_s=2.0, shallow=False) == 3
    assert ahead.how_many(SMALL, gpu, 3, loaded_s=60.0, shallow=True) == 3


@pytest.mark.parametrize(("cores", "count"), [(16, 3), (32, 3), (8, 1), (6, 0)])
def test_helpers_are_as_many_as_there_are_cores_for(
    cores: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    assert most_helpers() == count


@pytest.mark.parametrize(("free", "started", "count"), [(70, 3, 3), (70, 1, 1), (70, 0, 0), (40, 3, 0)])
def test_helpers_that_were_started_load_the_target_where_there_is_memory(
    free: int, started: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 80))
    assert ahead.how_many(SMALL, torch.device("cuda", 0), started, shallow=False) == count


@pytest.mark.parametrize(
    ("visible", "trial", "skip", "wanted"),
    [
        (True, {"device": None}, {}, 3),
        (True, {"device": "cuda:1"}, {}, 3),
        (True, {"device": "cpu"}, {}, 0),
        (True, {"device": None}, {"prescribed": "it took the process down"}, 0),
        (True, None, {}, 0),
        (False, {"device": None}, {}, 0),
        (None, {"device": None}, {}, 0),
    ],
)
def test_helpers_are_wanted_for_the_first_trial_on_a_gpu(
    visible: bool | None,
    trial: dict[str, str | None] | None,
    skip: dict[str, str],
    wanted: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    gpus = NOT_RECORDED if visible is None else (Gpu(name="NVIDIA H200", visible=visible),)
    surroundings = msgspec.structs.replace(named("m"), gpus=gpus)
    assert wanted_helpers({"trial": trial, "skip": skip}, surroundings) == wanted


def test_helpers_that_are_not_wanted_end_before_they_load(monkeypatch: pytest.MonkeyPatch) -> None:
    of = helpers(monkeypatch, EVERY, count=0)
    assert of.started == 0
    of = Helpers(ASKED, 3)
    assert of.started == 3
    pids = [process.pid for process in of._processes]
    of.load("cpu", None, 1)
    assert (of.started, sum(map(is_alive, pids))) == (1, 1)
    of.begin(WORK, CUTS)
    wait_for("both arms to be compiled", lambda: not of.under_way())
    assert of.outcomes() == {"a": 4.0, "b": 3.0}


def test_a_helper_that_is_told_nothing_imports_and_ends(tmp_path: Path) -> None:
    """It runs nothing of the target's."""
    (tmp_path / "model.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    request = {
        **ASKED,
        "target": str(tmp_path / "model.py"),
        "parent": os.getpid(),
        HELPING: ["nowhere", "html"],
    }
    code = f"import sys; from fp8doctor.worker.child import serve; serve({json.dumps(request)!r})"
    code += "; assert 'html' in sys.modules"
    done = subprocess.run(
        [sys.executable, "-c", code], input=b"", capture_output=True, timeout=LONGEST_S, check=True
    )
    assert (done.stdout, (tmp_path / "ran").exists()) == (b"", False)


def test_what_the_target_has_set_in_the_environment_holds_for_a_helper_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Helpers are started before it is loaded, and the GPUs that are seen are chosen before they load it."""
    monkeypatch.setenv("GONE", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    noted = "json.dump([os.environ.get(each) for each in ('GONE', 'CUDA_VISIBLE_DEVICES')], open(FILE, 'w'))"
    code = (
        "import json, os, sys\n"
        "from fp8doctor.worker import child; from fp8doctor.trial.measure import device\n"
        f"device.choose_device = lambda name: {noted.replace('FILE', repr(str(tmp_path / 'noted')))}\n"
        "child.serve(sys.argv[1])"
    )
    monkeypatch.setattr(sys, "orig_argv", [sys.executable, "-c", code, ""])
    of = Helpers(ASKED, 1)
    monkeypatch.delenv("GONE")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    of.load("cuda:0", None, 1)
    (process,) = of._processes
    wait_for("its end", lambda: process.poll() is not None)
    of.end()
    assert json.loads((tmp_path / "noted").read_text()) == [None, "1"]
