"""What a helper loads and builds ahead of a trial is what the trial finds in the caches."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch._dynamo.utils import counters

import fp8doctor
from fp8doctor.examine import examine
from fp8doctor.facts import Facts, Target
from fp8doctor.loading.job import Job
from fp8doctor.loading.model_file import load
from fp8doctor.trial import ahead
from fp8doctor.trial.copies.depth import Cut
from fp8doctor.trial.measure.attempt import Attempt
from fp8doctor.trial.measure.bench import Bench
from fp8doctor.trial.variant import ArmPlan, as_it_is
from fp8doctor.worker import parent
from fp8doctor.worker.ahead import Helpers
from fp8doctor.worker.request import TrialRequest
from tests.trial.decoder import job
from tests.waiting import wait_for
from tests.worker.helping import ASKED

pytestmark = pytest.mark.slow


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
