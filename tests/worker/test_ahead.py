"""Helpers compile what they are told, end when they are told, and cost nothing when they die."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch._dynamo.utils import counters

import fp8doctor
from fp8doctor.examine import examine
from fp8doctor.facts import NOT_RECORDED, Facts, Gpu, Target, Workload
from fp8doctor.facts.arm_names import Reason
from fp8doctor.facts.no_number import NoNumber
from fp8doctor.loading.job import Job
from fp8doctor.loading.model_file import load
from fp8doctor.trial import ahead
from fp8doctor.trial.copies.depth import Cut
from fp8doctor.trial.measure.attempt import Attempt
from fp8doctor.trial.measure.bench import Bench
from fp8doctor.trial.measure.device import DeviceLost
from fp8doctor.trial.variant import ArmPlan, as_it_is
from fp8doctor.worker import parent
from fp8doctor.worker.ahead import HELPING, Helpers, most_helpers
from fp8doctor.worker.child import wanted_helpers
from fp8doctor.worker.request import TrialRequest
from tests.logged import Records
from tests.trial.decoder import job
from tests.waiting import LONGEST_S, wait_for

WHOLE = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(layers))
    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x

def build_model(layers=16):
    model = Model(layers)
    model.compile()
    return model

def example_batch():
    return torch.ones(4, 8)
"""

pytestmark = pytest.mark.slow

SMALL = Job(model=torch.nn.Linear(2, 2), target=Target(), workload=Workload())

ASKED: dict[str, Any] = {"target": "m.py", "batch": None, "seq": None, "trial": None}


def helpers(monkeypatch: pytest.MonkeyPatch, code: str, count: int = 1) -> Helpers:
    """Helpers that run other code, told to load."""
    monkeypatch.setattr(sys, "orig_argv", [sys.executable, "-c", f"import json, sys\n{code}", ""])
    of = Helpers(ASKED, count)
    of.load("cpu", None, count)
    return of


LOADED = "sys.stdin.readline(); print('ready', flush=True)"

EVERY = f"{LOADED}\nfor line in sys.stdin: print(json.loads(line)[1]['blocks'] / 2, flush=True)"
"""Compiles whatever it is told in half a second a block."""

LARGE = Facts(target=Target(kind="file", name="m" * 2**20))
"""More than a pipe holds."""

WORK = [("a", 1), ("a", 0), ("b", 1)]

CUTS = [{"blocks": 2}, {"blocks": 6}]


def test_whoever_is_free_takes_the_next_work_and_tells_the_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    of = helpers(monkeypatch, EVERY, count=2)
    of.know(LARGE)
    assert of.begin(WORK, CUTS)
    wait_for("both arms to be compiled", lambda: not of.under_way())
    assert [of.took_s(arm) for arm in ("a", "b", "c")] == [4.0, 3.0, None]
    assert of.outcomes() == {"a": 4.0, "b": 3.0}
    assert [of.take(each, None) for each in WORK] == [3.0, 1.0, 3.0]
    assert of.end()
    assert not of.end()
    assert not of.begin(WORK, CUTS), "a trial that begins anew without them"
    assert of.outcomes() == {"a": 4.0, "b": 3.0}


def test_without_helpers_no_arm_was_to_be_compiled_beside_the_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    of = helpers(monkeypatch, EVERY, count=0)
    assert not of.begin(WORK, CUTS)
    assert of.outcomes() == {}


def test_an_arm_that_was_compiled_at_one_cut_only_is_not_done(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = "print(1 if json.loads(line)[1]['blocks'] == 2 else 'null', flush=True)"
    of = helpers(monkeypatch, f"{LOADED}\nfor line in sys.stdin: {answer}")
    of.begin(WORK, CUTS)
    (process,) = of._processes
    wait_for("its end", lambda: process.poll() is not None)
    assert [of.took_s(arm) for arm in ("a", "b")] == [None, None]
    assert [of.take(each, None) for each in WORK] == [None, 1.0, None]


def test_the_first_that_is_compiled_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    of = helpers(monkeypatch, EVERY)
    assert of.wait_for_one(["a"], 0.0) == {"a"}, "nobody was asked for it"
    of.begin([("a", 0), ("b", 1)], CUTS)
    assert of.wait_for_one(["a", "b"], 300.0) >= {"a"}
    assert of.took_s("a") == 1.0
    assert of.wait_for_one(["b"], 300.0) == {"b"}


def test_what_nobody_has_done_by_then_is_waited_for_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    of = helpers(monkeypatch, f"{LOADED}\nsys.stdin.readline(); import time; time.sleep(1e6)")
    of.begin(WORK, CUTS)
    assert of.wait_for_one(["a", "b"], 1e-2) == frozenset()
    wait_for("its first work", lambda: of.begun() == {"a"})
    assert of.under_way() == {"a", "b"}
    assert of.end()


def test_what_is_being_compiled_is_waited_for_and_what_is_not_is_left_to_the_trial(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of = helpers(monkeypatch, f"{LOADED}\nsys.stdin.readline(); import time; time.sleep(1e6)")
    of.begin(WORK, CUTS)
    wait_for("its first work", lambda: of.begun() == {"a"})
    assert of.take(("a", 0), None) is None
    assert of._waiting == [("b", 1)]
    assert of.take(("a", 1), 1e-3) is None, "it takes too long"
    threading.Timer(1e-2, of.end).start()
    assert of.take(("a", 1), None) is None, "it died"


def named(name: str) -> Facts:
    return Facts(target=Target(kind="file", name=name))


BY_FACTS = f"{LOADED}\nfor line in sys.stdin: print(len(json.loads(line)[2]['target']['name']), flush=True)"
"""Compiles whatever it is told in as many seconds as the target's name has letters."""


def test_what_was_compiled_before_all_is_known_counts_where_it_is_planned_alike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of = helpers(monkeypatch, BY_FACTS)
    (process,) = of._processes
    of.know(named("m"))
    assert of.begin([("a", 0), ("b", 0), ("gone", 0)], [None], more=True)
    wait_for("what is known", lambda: not of.under_way())
    of.know(named("mm"), {"a", "gone"})
    assert process.poll() is None, "it waits for more"
    assert of.under_way() == frozenset()
    assert of.begin([("c", 0), ("a", 0), ("b", 0)], [None])
    assert of.under_way() <= {"a", "c"}
    wait_for("its end", lambda: process.poll() is not None)
    assert of.outcomes() == {"c": 2, "a": 2, "b": 1}


@pytest.mark.parametrize("taken", [False, True])
def test_what_is_being_compiled_by_another_plan_is_not_waited_for_and_compiled_again(
    taken: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless the trial has come to it meanwhile."""
    held = f"import os, time\nwhile not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(1e-2)"
    of = helpers(monkeypatch, BY_FACTS.replace("print(len", f"exec({held!r}); print(len"))
    of.know(named("m"))
    of.begin([("a", 0), ("b", 0), ("c", 0)], [None], more=True)
    wait_for("its first work", lambda: of.begun() == {"a"})
    of.begin([("c", 0), ("b", 0), ("a", 0)], [None], more=True)
    assert of._waiting == [("c", 0), ("b", 0)], "in the new order, without what is being compiled"
    of.know(named("mm"), {"a", "b"})
    assert (of.begun(), of.under_way()) == (frozenset(), {"c"})
    if taken:
        assert of.take(("a", 0), None) is None
    of.begin([("a", 0), ("c", 0)], [None])
    assert of.under_way() == ({"c"} if taken else {"a", "c"})
    (tmp_path / "go").touch()
    wait_for("all of it", lambda: not of.under_way())
    assert of.outcomes() == {"a": None if taken else 2, "c": 2}


def test_helpers_that_wait_for_more_end_with_the_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    of = helpers(monkeypatch, EVERY, count=2)
    of.begin([("a", 0)], CUTS, more=True)
    wait_for("its work", lambda: not of.under_way())
    assert of.end()
    wait_for("nobody to be employed", lambda: of._employed == 0)
    assert not of.begin(WORK, CUTS)
    assert (of.under_way(), of.outcomes()) == (frozenset(), {"a": 1.0})


FOREVER = "import time; time.sleep(1e6)"


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_helpers_stand_still_while_something_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fp8doctor.worker.ahead.LONGEST_PAUSE_S", 1e6)
    of = helpers(monkeypatch, FOREVER, count=2)
    pids = [process.pid for process in of._processes]
    for interrupted in (False, True, False):
        with suppress(KeyboardInterrupt), of.paused():
            wait_for("them to stand still", lambda: [state(pid) for pid in pids] == ["T", "T"])
            if interrupted:
                raise KeyboardInterrupt
        wait_for("them to go on", lambda: "T" not in map(state, pids))
    with of.paused():
        assert of.end()
    assert not any(map(is_alive, pids))
    with of.paused():
        assert not of.end(), "nobody is there"


def test_what_helpers_were_stopped_in_is_done_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    of = helpers(monkeypatch, EVERY)
    with of.paused():
        of.begin(WORK, CUTS)
        assert of.under_way() == {"a", "b"}
    wait_for("both arms to be compiled", lambda: not of.under_way())
    assert of.outcomes() == {"a": 4.0, "b": 3.0}


def test_no_pause_holds_a_lock_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial may wait for a lock that a helper holds."""
    monkeypatch.setattr("fp8doctor.worker.ahead.LONGEST_PAUSE_S", 0.2)
    of = helpers(monkeypatch, FOREVER)
    (process,) = of._processes
    with of.paused():
        wait_for("it to go on", lambda: state(process.pid) != "T")
    assert of.end()


def test_a_stopped_helper_dies_with_the_trial() -> None:
    helper = (
        "import json, sys, time; from fp8doctor.worker.child import _die_with\n"
        "_die_with(json.loads(sys.argv[1])['parent']); print('there', flush=True); time.sleep(1e6)"
    )
    trial = (
        "import sys, time; from fp8doctor.worker import ahead; ahead.LONGEST_PAUSE_S = 1e6\n"
        f"sys.orig_argv = [sys.executable, '-c', {helper!r}, '']\n"
        f"of = ahead.Helpers({ASKED!r}, 1); (process,) = of._processes; process.stdout.readline()\n"
        f"with of.paused(): print(process.pid, flush=True); time.sleep(1e6)"
    )
    dying = subprocess.Popen([sys.executable, "-c", trial], stdout=subprocess.PIPE)
    assert dying.stdout is not None
    pid = int(dying.stdout.readline())
    wait_for("it to stand still", lambda: state(pid) == "T")
    dying.kill()
    dying.communicate(timeout=LONGEST_S)
    wait_for("its end", lambda: not is_alive(pid))


def test_what_was_begun_only_now_is_left_to_the_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    of = helpers(monkeypatch, f"{LOADED}\nsys.stdin.readline(); import time; time.sleep(1e6)")
    of.begin([("a", 0)], CUTS)
    wait_for("its work", lambda: of.begun() == {"a"})
    of.pass_by("b", 1e6)
    of.pass_by("a", 0.0)
    assert of.begun() == {"a"}, "another arm, and one that was begun longer ago"
    of.pass_by("a", 1e6)
    assert not of.under_way()
    assert of.take(("a", 0), None) is None
    assert of.end()


def test_what_helpers_did_and_the_trial_waited_for_is_logged(
    monkeypatch: pytest.MonkeyPatch, logged: Records
) -> None:
    logging.getLogger("fp8doctor").setLevel(logging.DEBUG)
    of = helpers(monkeypatch, EVERY)
    of.begin(WORK, CUTS)
    assert of.wait_for_one(["b"], 300.0) == {"b"}
    of.take(("a", 1), None)
    of.take(("c", 1), None)
    wait_for("the last line", lambda: "compiled in 3.0 s ('b', 1)" in logged.text())
    for line in (
        r"a helper loaded the target, \d+\.\d s after it was told to load",
        r"a helper compiled in 1\.0 s \('a', 0\), \d+\.\d s after it was told to load",
        r"the trial waited \d+\.\d s for one of b: b",
        r"the trial waited 0\.0 s for \('a', 1\), which took 3\.0 s",
        r"the trial waited 0\.0 s for \('c', 1\), which is not compiled",
    ):
        assert re.search(line, logged.text()), line


def test_one_that_dies_or_hangs_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for code in ("sys.exit(1)", "import time; time.sleep(1e6)"):
        of = helpers(monkeypatch, code)
        of.know(LARGE)
        of.begin(WORK, CUTS)
        assert of.take(("a", 1), None) is None
        assert of.end()
        assert of.wait_for_one(["a", "b"], 300.0) == {"a", "b"}, "nobody is left to compile them"
        assert of.outcomes() == {"a": None, "b": None}


def test_one_that_tells_nonsense_is_not_listened_to(monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    of = helpers(monkeypatch, f"{LOADED}\nfor line in sys.stdin: print('Aborted', flush=True)")
    of.begin(WORK, CUTS)
    wait_for("its end", lambda: not of.under_way())
    assert [of.take(each, None) for each in WORK] == [None, None, None]
    assert of.end()
    assert not raised


def test_what_a_helper_started_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers of the compiler have workers of their own."""
    sleep = "import time; time.sleep(1e6)"
    worker = (
        f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {sleep!r}]).pid); {sleep}"
    )
    code = f"import subprocess; subprocess.run([sys.executable, '-uc', {worker!r}])"
    (process,) = (of := helpers(monkeypatch, code))._processes
    assert process.stdout is not None
    pid = process.stdout.readline()
    assert is_alive(int(pid))
    of.end()
    wait_for("its end", lambda: not is_alive(int(pid)))


def is_alive(pid: int) -> bool:
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def test_one_that_cannot_be_started_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "orig_argv", ["/nowhere/python", ""])
    of = Helpers(ASKED, 2)
    of.load("cpu", None, 2)
    assert not of.begin(WORK, CUTS)
    assert of.take(("a", 1), None) is None
    assert not of.end()


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


def test_nothing_is_written_where_the_target_closed_the_pipes_of_helpers(tmp_path: Path) -> None:
    """Its own files may be under their numbers by then, as where it closes all that it does not know."""
    trial = (
        "import os, sys; from fp8doctor.worker.ahead import Helpers\n"
        "sys.orig_argv = [sys.executable, '-c', 'import sys; sys.stdin.readline()', '']\n"
        f"of = Helpers({ASKED!r}, 2); os.closerange(3, 64)\n"
        f"files = [open({str(tmp_path)!r} + f'/{{i}}', 'w') for i in range(8)]\n"
        "of.load('cpu', None, 1); assert not of.begin([('a', 0)], [None]); of.end(); del of\n"
        "for file in files: file.write('mine'); file.close()"
    )
    subprocess.run([sys.executable, "-c", trial], timeout=LONGEST_S, check=True)
    assert {file.read_text() for file in tmp_path.iterdir()} == {"mine"}


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


def test_an_arm_that_costs_a_helper_its_gpu_is_told_and_another_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compiled kernel that reads where it may not takes the whole context down (rowwise of a block with a
    concatenation, torch 2.11 on an H200)."""
    answers = "print('\"it took the GPU down\"' if json.loads(line)[0] == 'a' else 1, flush=True)"
    of = helpers(
        monkeypatch,
        f"{LOADED}\nfor line in sys.stdin: {answers}; json.loads(line)[0] == 'a' and sys.exit()",
        2,
    )
    of.begin([("a", 0), ("b", 0), ("c", 0)], [None])
    wait_for("all of it", lambda: not of.under_way())
    assert [of.lost(arm) for arm in "abc"] == ["it took the GPU down", None, None]
    assert of.outcomes() == {"a": None, "b": 1, "c": 1}


def test_no_other_helper_is_given_an_arm_that_costs_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """One graph of several blocks is to be compiled at every cut."""
    answers = "print('\"it took the GPU down\"' if json.loads(line)[0] == 'a' else 1, flush=True)"
    of = helpers(monkeypatch, f"{LOADED}\nfor line in sys.stdin: {answers}")
    of.begin([("a", 1), ("a", 0)], CUTS, more=True)
    wait_for("its answer", lambda: of.lost("a"))
    assert not of.under_way()
    of.begin([("a", 1), ("a", 0), ("b", 0)], CUTS)
    assert of._waiting == [("b", 0)]


def test_an_arm_that_is_planned_otherwise_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    of = helpers(
        monkeypatch, f"{LOADED}\nfor line in sys.stdin: print('\"it took the GPU down\"', flush=True)", 2
    )
    of.begin([("a", 0), ("b", 0)], [None], more=True)
    wait_for("both answers", lambda: not of.under_way())
    of.know(named("mm"), {"a"})
    assert [of.lost(arm) for arm in "ab"] == [None, "it took the GPU down"]
    of.begin([("a", 0), ("b", 0)], [None])
    assert of._waiting == [("a", 0)]


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


def test_a_helper_whose_gpu_is_lost_builds_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    def losing(variant: Any) -> Any:
        raise DeviceLost("a", "it took the GPU's context down")

    plans = [ArmPlan("a", losing), ArmPlan("b", as_it_is)]
    monkeypatch.setattr(ahead, "arms", lambda facts, prescription, of: plans)
    monkeypatch.setattr(Bench, "build", lambda self, attempt: attempt.plan.make(None))
    of = job(blocks=26)
    work = [(name, None, examine(of).to_dict()) for name in "ab"]
    built = list(ahead.compile_arms(of, work, lambda facts: (), torch.device("cpu")))
    assert built == ["it took the GPU's context down"]


@pytest.mark.parametrize(("why", "told"), [(Reason.OUT_OF_MEMORY, False), (Reason.RAISES, None)])
def test_a_helper_tells_that_it_found_no_memory(
    why: Reason, told: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crowded(self: Bench, attempt: Attempt) -> None:
        attempt.no_number = NoNumber(why, "others have it")

    monkeypatch.setattr(ahead, "arms", lambda facts, prescription, of: [ArmPlan("a", as_it_is)])
    monkeypatch.setattr(Bench, "build", crowded)
    of = job(blocks=2)
    work = [("a", None, examine(of).to_dict())]
    assert list(ahead.compile_arms(of, work, lambda facts: (), torch.device("cpu"))) == [told]


NO_MEMORY_TWICE = f"""{LOADED}
import os, time
for line in sys.stdin:
    arm = json.loads(line)[0]
    try:
        os.mkdir(f"FOLDER/{{arm}}")
        print("false", flush=True)
    except FileExistsError:
        print(1.0, flush=True)
"""
"""Finds no memory for an arm that nobody tried before."""


def test_a_helper_that_finds_no_memory_leaves_its_work_to_the_others_and_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three filled an H100 beside a Gemma 2B, whose BF16 then ended all of them."""
    of = helpers(monkeypatch, NO_MEMORY_TWICE.replace("FOLDER", str(tmp_path)), count=3)
    of.begin([("a", 0), ("b", 0)], CUTS)
    wait_for("all of it", lambda: not of.under_way())
    assert of.outcomes() == {"a": 1.0, "b": 1.0}
    wait_for("the end of all", lambda: all(process.poll() is not None for process in of._processes))


def test_the_last_helper_gives_a_work_up_that_it_finds_no_memory_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = helpers(monkeypatch, NO_MEMORY_TWICE.replace("FOLDER", str(tmp_path)))
    of.begin([("a", 0)], CUTS)
    wait_for("its end", lambda: not of.under_way())
    assert of.outcomes() == {"a": None}


def test_the_last_that_began_gives_way_and_the_others_take_up_its_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = f"import os, time\nwhile not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(1e-2)"
    of = helpers(monkeypatch, BY_FACTS.replace("print(len", f"exec({held!r}); print(len"), count=2)
    of.know(named("m"))
    of.begin([("a", 0), ("b", 0)], [None])
    wait_for("both of them at work", lambda: of.begun() == {"a", "b"})
    assert of.give_way()
    wait_for("its work to be left", lambda: len(of._builds) == 1)
    assert (of.begun(), of.under_way()) == ({"a"}, {"a", "b"})
    (tmp_path / "go").touch()
    wait_for("all of it", lambda: not of.under_way())
    assert of.outcomes() == {"a": 1, "b": 1}
    of.end()
    assert not of.give_way()


class Noting(torch.nn.Linear):
    """A model that notes where it is moved, as far as it can be moved."""

    def __init__(self, *, movable: bool) -> None:
        super().__init__(2, 2)
        self.movable, self.moved = movable, list[str]()

    def to(self, *where: Any, **how: Any) -> Any:
        self.moved += where
        if not self.movable:
            raise TypeError("these weights cannot be moved")
        return super().to(*where, **how)


@pytest.mark.parametrize("movable", [True, False])
@pytest.mark.parametrize(
    ("device", "small_gib", "moved"), [("cuda", 0, ["cpu"]), ("cuda", 4, []), ("cpu", 0, [])]
)
def test_a_helper_keeps_no_large_model_on_the_gpu(
    device: str, small_gib: int, moved: list[str], movable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The smallest cuts of a Llama 3B and a Gemma 2B need 10 and 12 GiB, and their models 6 and 5: together
    more than a helper has of 80 (H100)."""
    monkeypatch.setattr(ahead, "SMALL_GIB", small_gib)
    model = Noting(movable=movable)
    ahead.off_the_gpu(replace(SMALL, model=model), torch.device(device))
    assert model.moved == moved


@pytest.mark.parametrize(
    ("blocks", "compiled", "layers"), [(26, False, 2), (1, False, None), (26, True, 6), (12, True, None)]
)
def test_one_graph_is_compiled_at_the_cuts_of_the_trial(
    blocks: int, compiled: bool, layers: int | None
) -> None:
    of = job(blocks=blocks, rebuild=lambda layers: (torch.nn.Linear(2, 2), None))
    if compiled:
        of.model.compile(backend="eager")
    assert ahead.layers_to_load(of, examine(of)) == layers
    assert ahead.layers_to_load(replace(of, rebuild=None), examine(of)) is None, "nothing builds fewer"


def test_a_helper_loads_each_kind_of_block_behind_another() -> None:
    of = job(blocks=26, rebuild=lambda layers: (torch.nn.Linear(2, 2), None))
    for block in of.model.blocks[1::2]:  # type: ignore[index,union-attr]
        block.window = 4
    assert ahead.layers_to_load(of, examine(of)) == 3


def test_arms_are_built_at_their_cut_and_those_that_fail_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks: list[int] = []

    def noted(variant: Any) -> Any:
        blocks.append(len(variant.model.blocks))
        return variant

    def failing(variant: Any) -> Any:
        raise ValueError("no kernel")

    plans = [ArmPlan("a", noted), ArmPlan("b", failing), ArmPlan("c", as_it_is)]
    monkeypatch.setattr(ahead, "arms", lambda facts, prescription, of: plans)
    of = job(blocks=26)
    work = [
        ("b", None),
        ("a", None),
        ("unknown", None),
        ("a", {"blocks": 3}),
        ("a", {"block": 3}),
        ("c", None),
    ]
    told = examine(of).to_dict()
    whole = [(*each, told) for each in work]
    built = list(ahead.compile_arms(of, whole, lambda facts: (), torch.device("cpu")))
    assert [seconds is not None for seconds in built] == [False, True, False, True, False, True]
    assert blocks == [2, 3]


def test_arms_are_planned_anew_where_the_facts_are_others(monkeypatch: pytest.MonkeyPatch) -> None:
    proposed: list[str] = []

    def by_name(facts: Facts, prescription: Any, of: Job) -> list[ArmPlan]:
        return [ArmPlan(facts.target.name, as_it_is)]

    monkeypatch.setattr(ahead, "arms", by_name)
    of = job(blocks=3)
    facts = [msgspec.structs.replace(examine(of), target=Target(name=name)).to_dict() for name in ("a", "b")]
    work = [("a", None, facts[0]), ("a", None, facts[0]), ("a", None, facts[1]), ("b", None, facts[1])]
    cpu = torch.device("cpu")
    built = list(ahead.compile_arms(of, work, lambda told: proposed.append(told.target.name) or (), cpu))
    assert [seconds is not None for seconds in built] == [True, True, False, True]
    assert proposed == ["a", "b"]


@pytest.mark.inductor
def test_a_helper_leaves_one_graph_of_several_blocks_in_the_caches_that_the_trial_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.py").write_text(WHOLE)
    target = str(tmp_path / "model.py")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", [*sys.argv])
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "caches"))
    facts = examine(job := load(target))
    package = str(Path(fp8doctor.__file__).resolve())
    monkeypatch.setattr(sys, "orig_argv", [sys.executable, "-P", "-c", parent._BOOT, package, "{}", ""])
    trial = {"budget_s": 60.0, "device": "cpu", "select": (), "ignore": (), "checks": (), "trace": None}
    assert TrialRequest(**trial)
    layers = ahead.layers_to_load(job, facts)
    of = Helpers({**ASKED, "target": target, "trial": trial}, 1, ["torch._inductor.compile_fx"])
    of.load("cpu", layers, 1)
    of.know(facts)
    cut = {"blocks": 2}
    of.begin([("as_is", 0)], [cut])
    (process,) = of._processes
    wait_for("its end", lambda: process.poll() is not None)
    assert of.took_s("as_is")
    assert process.wait() == 0
    counters.clear()
    attempt = Attempt(ArmPlan("as_is", as_it_is))
    Bench(job, ["blocks"], torch.device("cpu"), only=Cut(cut)).build(attempt)
    assert attempt.no_number is None
    caches = counters["inductor"]
    assert (caches["fxgraph_cache_hit"], caches["fxgraph_cache_miss"]) == (2, 0), "forward and backward"


def test_blocks_have_every_graph_of_theirs_compiled_where_nothing_asks_the_first_for_a_gradient() -> None:
    """Adapters on a frozen model: the first block is another graph, so that one block is not enough."""
    of = job(blocks=26)
    of.model.embedding.requires_grad_(False)
    for block in of.model.blocks:  # type: ignore[union-attr]
        block.compile(backend="eager")
    torch._dynamo.reset()
    counters.clear()
    Bench(of, ["blocks"], torch.device("cpu")).build(Attempt(ArmPlan("as_is", as_it_is, fp8=True)))
    of_the_trial = counters["stats"]["unique_graphs"]
    torch._dynamo.reset()
    counters.clear()
    work = [("as_is", None, examine(of).to_dict())]
    (seconds,) = ahead.compile_arms(of, work, lambda facts: (), torch.device("cpu"))
    assert seconds is not None
    assert counters["stats"]["unique_graphs"] == of_the_trial == 2
