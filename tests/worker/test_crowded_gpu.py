"""A helper that loses its GPU or finds no memory on it leaves its work to the others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8doctor.examine import examine
from fp8doctor.facts.arm_names import Reason
from fp8doctor.facts.no_number import NoNumber
from fp8doctor.trial import ahead
from fp8doctor.trial.measure.attempt import Attempt
from fp8doctor.trial.measure.bench import Bench
from fp8doctor.trial.measure.device import DeviceLost
from fp8doctor.trial.variant import ArmPlan, as_it_is
from tests.trial.decoder import job
from tests.waiting import wait_for
from tests.worker.helping import BY_FACTS, CUTS, LOADED, SMALL, helpers, named

pytestmark = pytest.mark.slow


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
