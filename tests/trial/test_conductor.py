"""The whole trial on a CPU: every arm proven, failures cost one arm, and the user's job is left as it was."""

from __future__ import annotations

import itertools
import logging
import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch.utils.checkpoint import checkpoint
from torchao.float8 import convert_to_float8_training

import fp8doctor.trial
from fp8doctor import inspect_model
from fp8doctor.analysis.median_interval import Interval
from fp8doctor.facts import Arm, Target, Trial, Workload, recorded
from fp8doctor.facts.arm_names import Reason
from fp8doctor.loading.job import Job
from fp8doctor.trial import conductor
from fp8doctor.trial.arms import chain, eager_bf16, on_model
from fp8doctor.trial.conductor import conduct
from fp8doctor.trial.copies.depth import Cut, Plan
from fp8doctor.trial.copies.replica import NotReplicable
from fp8doctor.trial.early import is_for_others
from fp8doctor.trial.layers.numerics import NUMERICS
from fp8doctor.trial.measure import bench, profile_step, timer, window
from fp8doctor.trial.measure.ahead import Nobody, Work
from fp8doctor.trial.measure.attempt import Attempt
from fp8doctor.trial.measure.bench import Bench
from fp8doctor.trial.measure.budget import CLOSING_S, WINDOW_SHARE, WITHIN, Budget, Cost
from fp8doctor.trial.measure.device import DeviceLost
from fp8doctor.trial.measure.evidence import StepProof
from fp8doctor.trial.measure.profile_step import BREAKDOWN, Tracer
from fp8doctor.trial.measure.run import TrialRun
from fp8doctor.trial.state.digest import CONTEXT
from fp8doctor.trial.treatments import NotTried, compile_blocks
from fp8doctor.trial.variant import ArmPlan, Variant, as_it_is
from tests.logged import Records

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(timer, "MOST_ROUNDS", timer.LEAST_ROUNDS)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny tensors on a shared machine: more threads wait for each other
    yield
    torch.set_num_threads(threads)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.silu(self.up(self.norm(x))))


class Decoder(nn.Module):
    def __init__(self, blocks: int = 12, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(96, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(width, 96, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.dropout(x))


def job(blocks: int = 26, **settings: Any) -> Job:
    model = convert_to_float8_training(
        Decoder(blocks).bfloat16(), module_filter_fn=lambda layer, name: name != "head"
    )
    batch = torch.randint(0, 96, (1, 16))
    loss = lambda output, batch: nn.functional.cross_entropy(output.flatten(0, 1).float(), batch.flatten())  # noqa: E731
    return Job(
        **{
            "model": model,
            "target": Target(),
            "workload": Workload(accumulate=1, batch_source="given"),
            "batch": batch,
            "loss": loss,
            **settings,
        }
    )


AS_IS = ArmPlan("as_is", as_it_is, fp8=True)
BF16 = ArmPlan("bf16", eager_bf16, fp8=False)
PRESCRIBED = ArmPlan("prescribed", on_model(compile_blocks, lists=["blocks"]), ("compile-blocks",), fp8=True)


def run(
    of: Job, *arms: ArmPlan, lists: tuple[str, ...] = ("blocks",), budget_s: float = 600.0
) -> dict[str, Arm]:
    return {arm.name: arm for arm in trial(of, *arms, lists=lists, budget_s=budget_s).arms}


def trial(of: Job, *arms: ArmPlan, lists: tuple[str, ...] = ("blocks",), budget_s: float = 600.0) -> Trial:
    return conduct(of, lists, arms, TrialRun(CPU, Budget(budget_s)))


def test_every_arm_carries_its_proof() -> None:
    arms = run(job(), AS_IS, BF16, PRESCRIBED)
    assert {name: (arm.tried, arm.fp8_gemms, arm.graphs_run) for name, arm in arms.items()} == {
        "as_is": (True, 12 * 2 * 3, 0),
        "bf16": (True, 0, 0),
        "prescribed": (True, 12 * 2 * 3, 12),
    }
    assert [dict(cut.blocks) for cut in arms["as_is"].cuts] == [{"blocks": 4}, {"blocks": 12}]
    assert arms["as_is"].step_ms is not None
    assert len(arms["as_is"].rounds_ms) >= timer.LEAST_ROUNDS


def test_the_full_step_is_predicted_from_the_cuts() -> None:
    arm = run(job(), AS_IS)["as_is"]
    shallow, deep = arm.cuts
    assert shallow.step_ms is not None
    assert deep.step_ms is not None
    by_medians = deep.step_ms + (26 - 12) * (deep.step_ms - shallow.step_ms) / 8
    assert arm.low_ms <= by_medians <= arm.high_ms  # type: ignore[operator]
    assert arm.low_ms <= arm.step_ms <= arm.high_ms  # type: ignore[operator]


def test_a_short_model_is_measured_whole() -> None:
    result = trial(job(blocks=3), AS_IS)
    assert result.blocks == {}
    assert result.arms[0].fp8_gemms == 3 * 2 * 3


class Clock:
    """A clock that only a step moves, so that no load of the machine is in a test."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


CLOCK = Clock()
STEP_MS = 10.0


class Ticking(Decoder):
    """A model whose forward takes `STEP_MS` by that clock, times ``share``."""

    share = 1.0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        CLOCK.now_s += self.share * STEP_MS / 1e3
        return super().forward(tokens)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timer, "time", SimpleNamespace(perf_counter=CLOCK, monotonic=time.monotonic))


def slowed(share: float) -> Callable[[Variant], Variant]:
    """BF16 with a forward that takes so much longer."""

    def make(variant: Variant) -> Variant:
        variant = BF16.make(variant)
        forward = variant.model.forward

        def slow(tokens: torch.Tensor) -> torch.Tensor:
            CLOCK.now_s += share * STEP_MS / 1e3
            return forward(tokens)

        variant.model.forward = slow  # type: ignore[method-assign]
        return variant

    return make


@pytest.mark.usefixtures("clock")
def test_a_planted_slowdown_of_ten_percent_is_found() -> None:
    arms = run(job(model=Ticking(3).bfloat16()), BF16, ArmPlan("slow", slowed(0.10), fp8=False))
    assert arms["bf16"].step_ms == pytest.approx(STEP_MS)
    assert arms["slow"].step_ms == pytest.approx(1.10 * STEP_MS)


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize(("share", "reliable"), [(0.0, True), (0.01, True), (0.03, False)])
def test_a_copy_that_differs_makes_the_trial_unreliable(share: float, reliable: bool) -> None:
    result = trial(job(model=Ticking(3).bfloat16()), BF16, ArmPlan("bf16_again", slowed(share), fp8=False))
    assert result.self_check_ratio == pytest.approx(1 / (1 + share))
    assert result.reliable is reliable
    assert ("against its own copy" in (result.reason or "")) is not reliable


# Two phases: what gained alone is put together, and timed.


def faster(share: float, only_alone: float = 1.0) -> Callable[[Variant], Variant]:
    """A change that makes the step take ``share`` of its time, and ``only_alone`` times that on top of
    another change."""

    def make(variant: Variant) -> Variant:
        model: Any = variant.model
        model.share = model.share * share * (only_alone if model.share not in (1.0, PROPOSED) else 1.0)
        return variant

    return make


PROPOSED = 0.9
"""Share of the step that the planted proposal leaves."""


def explored(
    name: str, change: Callable[[Variant], Variant], base: ArmPlan, treatments: tuple[str, ...] | None = None
) -> ArmPlan:
    return ArmPlan(
        name,
        chain(base.make, change),
        (name,) if treatments is None else treatments,
        True,
        base.name,
        change,
        explored=True,
    )


def ticking() -> Job:
    return job(
        model=convert_to_float8_training(
            Ticking(1).bfloat16(), module_filter_fn=lambda layer, name: name != "head"
        )
    )


TICKING_BF16 = ArmPlan("bf16", chain(BF16.make, faster(0.5)), fp8=False)
PLANTED = ArmPlan("prescribed", faster(PROPOSED), ("proposal",), True, "as_is", faster(PROPOSED))


def times(result: Trial) -> dict[str, tuple[float, str | None]]:
    """Step in tenths of a millisecond and base of every arm with a number."""
    return {arm.name: (round(10 * (arm.step_ms or 0)), arm.base) for arm in result.arms if arm.tried}


@pytest.mark.usefixtures("clock")
def test_without_a_winner_nothing_changes_and_nothing_is_done_twice() -> None:
    plans = (
        AS_IS,
        TICKING_BF16,
        PLANTED,
        explored("even", faster(1.0), PLANTED),
        explored("slower", faster(1.2), PLANTED),
    )
    result = trial(ticking(), *plans)
    assert times(result) == {
        "as_is": (100, None),
        "bf16": (50, None),
        "prescribed": (90, "as_is"),
        "even": (90, "prescribed"),
        "slower": (108, "prescribed"),
    }


@pytest.mark.usefixtures("clock")
def test_one_winner_is_the_prescription_and_is_not_timed_again() -> None:
    result = trial(
        ticking(),
        AS_IS,
        TICKING_BF16,
        PLANTED,
        explored("winner", faster(0.8), PLANTED),
        explored("slower", faster(1.2), PLANTED),
    )
    arms = {arm.name: arm for arm in result.arms}
    assert times(result) == {
        "prescribed": (72, "as_is"),
        "as_is": (100, None),
        "bf16": (50, None),
        "prescribed_first": (90, "as_is"),
        "winner": (72, "prescribed_first"),
        "slower": (108, "prescribed_first"),
    }
    assert arms["prescribed"].treatments == ("proposal", "winner")
    assert arms["prescribed"].rounds_ms == arms["winner"].rounds_ms


@pytest.mark.usefixtures("clock")
def test_several_winners_are_put_together_and_timed_beside_what_they_are_compared_with() -> None:
    plans = [
        explored("a", faster(0.8), PLANTED),
        explored("b", faster(0.7), PLANTED),
        explored("measurement", faster(0.1), PLANTED, ()),
    ]
    result = trial(ticking(), AS_IS, TICKING_BF16, PLANTED, *plans)
    arms = {arm.name: arm for arm in result.arms}
    assert times(result) == {
        "as_is": (100, None),
        "bf16": (50, None),
        "prescribed": (50, "as_is"),
        "as_is_first": (100, None),
        "bf16_first": (50, None),
        "prescribed_first": (90, "as_is_first"),
        "a": (72, "prescribed_first"),
        "b": (63, "prescribed_first"),
        "measurement": (9, "prescribed_first"),
    }
    assert arms["prescribed"].treatments == ("proposal", "a", "b")
    assert len({len(arms[name].rounds_ms) for name in ("as_is", "bf16", "prescribed")}) == 1
    assert arms["prescribed"].fp8_gemms == 2 * 3


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("base", [AS_IS, PLANTED], ids=["as_is", "prescribed"])
def test_a_combination_that_is_slower_than_the_best_alone_is_dropped(base: ArmPlan) -> None:
    plans = [explored("a", faster(0.8), base), explored("b", faster(0.7, only_alone=2.0), base)]
    result = trial(ticking(), AS_IS, TICKING_BF16, *([base] if base is PLANTED else []), *plans)
    start = PROPOSED if base is PLANTED else 1.0
    arms = {arm.name: arm for arm in result.arms}
    assert times(result)["prescribed"] == (round(100 * start * 0.7), "as_is")
    assert arms["prescribed"].treatments == (*base.treatments, "b")
    assert times(result)["combination"] == (round(100 * start * 0.8 * 0.7 * 2), "as_is")


@pytest.mark.usefixtures("clock")
def test_a_combination_that_fails_leaves_the_best_alone() -> None:
    def clashing(variant: Variant) -> Variant:
        if variant.model.share == 0.8:  # type: ignore[comparison-overlap]
            raise NotTried("they clash")
        return faster(0.7)(variant)

    result = trial(
        ticking(), AS_IS, TICKING_BF16, explored("a", faster(0.8), AS_IS), explored("b", clashing, AS_IS)
    )
    arms = {arm.name: arm for arm in result.arms}
    assert (arms["combination"].tried, arms["combination"].reason) == (False, "they clash")
    assert times(result) == {
        "prescribed": (70, "as_is"),
        "as_is": (100, None),
        "bf16": (50, None),
        "a": (80, "as_is"),
        "b": (70, "as_is"),
    }


@pytest.mark.usefixtures("clock")
def test_a_combination_that_fails_while_it_is_timed_leaves_the_best_alone_and_the_rest_of_the_trial() -> None:
    def wears_out(variant: Variant) -> Variant:
        alone = variant.model.share == 1.0  # type: ignore[comparison-overlap]
        return faster(0.7)(variant if alone else worn(4).make(variant))

    result = trial(
        ticking(), AS_IS, TICKING_BF16, explored("a", faster(0.8), AS_IS), explored("b", wears_out, AS_IS)
    )
    arms = {arm.name: arm for arm in result.arms}
    assert arms["combination"].reason == "it raises RuntimeError: worn out"
    assert times(result)["prescribed"] == (70, "as_is")
    assert "trial.numerics" in result.gaps, "which were asked for, and are told for what they lack"


@pytest.mark.usefixtures("clock")
def test_of_one_family_the_best_is_taken() -> None:
    recipes = [
        explored("recipe-rowwise", faster(0.8), AS_IS),
        explored("recipe-tensorwise", faster(0.7), AS_IS),
    ]
    result = trial(ticking(), AS_IS, TICKING_BF16, *recipes)
    assert next(arm.treatments for arm in result.arms if arm.name == "prescribed") == ("recipe-tensorwise",)


@pytest.mark.usefixtures("clock")
def test_a_proposal_that_is_faster_alone_than_all_together_is_the_prescription() -> None:
    alone = ArmPlan("good", faster(0.7), ("good",), True, "as_is", faster(0.7))
    both = ArmPlan("prescribed", faster(0.8), ("good", "bad"), True, "as_is", faster(0.8))
    result = trial(ticking(), AS_IS, TICKING_BF16, both, alone)
    assert times(result)["prescribed"] == (70, "as_is")
    assert next(arm.treatments for arm in result.arms if arm.name == "prescribed") == ("good",)


@pytest.mark.usefixtures("clock")
def test_a_model_without_fp8_gets_no_prescription_of_what_gained() -> None:
    plain = ArmPlan("as_is", as_it_is, fp8=False)
    winner = ArmPlan("winner", faster(0.5), ("winner",), False, "as_is", faster(0.5), explored=True)
    assert times(trial(job(model=Ticking(3).bfloat16()), plain, winner)) == {
        "as_is": (100, None),
        "winner": (50, "as_is"),
    }


@pytest.mark.usefixtures("clock")
def test_times_are_given_for_the_tokens_of_the_step_as_it_is() -> None:
    twice = ArmPlan(
        "larger-batch",
        lambda variant: replace(variant, batch=torch.cat([variant.batch] * 2)),
        ("larger-batch",),
        True,
        "as_is",
        tokens_ratio=2.0,
    )
    arms = run(ticking(), AS_IS, twice)
    assert (arms["larger-batch"].step_ms, arms["larger-batch"].tokens_ratio) == (
        pytest.approx(STEP_MS / 2),
        2.0,
    )
    assert arms["larger-batch"].cuts[0].step_ms == pytest.approx(STEP_MS / 2)


def test_explorations_go_first_when_the_time_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Budget, "fits", lambda self, *cost, within: within == WITHIN)
    proposal = ArmPlan("proposal", as_it_is, ("proposal",), True, "as_is")
    arms = run(
        job(blocks=3),
        AS_IS,
        BF16,
        proposal,
        explored("unasked", as_it_is, AS_IS),
        explored("measurement", as_it_is, AS_IS, ()),
    )
    late = Reason.NOT_EXPECTED_TO_FIT
    assert {name: arm.why for name, arm in arms.items()} == {
        "as_is": None,
        "bf16": None,
        "proposal": late,
        "unasked": late,
        "measurement": late,
    }
    assert (arms["proposal"].reason or "").startswith("the budget of 600 s has no room for the ")


@pytest.mark.parametrize("spent", [0.5, 0.7, 1.5, 2.5])
@pytest.mark.parametrize(
    ("needed", "share"), [("bf16", 2.0), ("bf16_compiled", 2.0), ("prescribed", 1.0), ("float8_rowwise", 1.0)]
)
def test_a_baseline_is_begun_after_a_compilation_that_took_the_whole_budget(
    spent: float, needed: str, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen on an H200: one graph of 24 FP8 blocks compiles for 80 s. A step without BF16 beside it says
    nothing."""
    monkeypatch.setattr(Budget, "spent_s", property(lambda self: spent * self.seconds))
    arms = run(job(blocks=3), AS_IS, replace(BF16, name=needed))
    assert arms[needed].tried is (spent < share)


COMPILED_BF16 = ArmPlan("bf16_compiled", as_it_is, fp8=False, compiled=True)


@pytest.mark.parametrize(
    ("compiled", "as_one", "ahead"),
    [
        (None, False, ["prescribed"]),
        ("blocks", False, ["bf16_compiled", "prescribed"]),
        ("step", False, ["bf16_compiled", "prescribed"]),
        ("blocks", True, ["as_is", "bf16_compiled", "prescribed"]),
    ],
)
def test_bf16_is_compiled_beside_a_step_that_compiles_itself(
    compiled: str | None, as_one: bool, ahead: list[str]
) -> None:
    """One that does not is through before a helper has loaded the model."""
    of = job(blocks=3)
    if compiled == "blocks":
        for block in of.model.blocks:  # type: ignore[union-attr]
            block.compile(backend="eager")
    elif compiled == "step":
        of = replace(of, training_step=torch.compile(lambda model, batch: model(batch).mean()))
    plans = (AS_IS, BF16, COMPILED_BF16, PRESCRIBED)
    assert [plan.name for plan in plans if is_for_others(plan, of, as_one=as_one)] == ahead


def test_the_first_conversion_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Budget, "fits", lambda self, *cost, within: within == WITHIN)
    arms = run(
        job(blocks=3),
        AS_IS,
        ArmPlan("float8_tensorwise", as_it_is, ("x",), base="as_is"),
        ArmPlan("float8_rowwise", as_it_is, ("x",), base="as_is"),
    )
    assert (arms["float8_tensorwise"].tried, arms["float8_rowwise"].tried) == (True, False)


def test_the_window_ends_in_time_for_what_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    ends, timed = [], window.interleave_arms

    def noted(of: bench.Bench, attempts: Any, until: Any, latest: float, soon: float, more_s: float) -> Any:
        result = timed(of, attempts, until, latest, soon, more_s)
        assert more_s == (WITHIN - 1) * 600
        ends.append(tuple(each - time.monotonic() for each in (until(result), latest, soon)))
        return result

    monkeypatch.setattr(window, "interleave_arms", noted)
    began = time.monotonic()
    run(job(blocks=3), AS_IS, explored("unasked", as_it_is, AS_IS))
    ((until, latest, soon),) = ends
    assert WINDOW_SHARE * 600 - 10 <= soon <= WINDOW_SHARE * 600
    took_s = time.monotonic() - began
    assert 600 - CLOSING_S - 10 - took_s <= until < 600 - CLOSING_S
    assert WITHIN * 600 - CLOSING_S - 10 - took_s <= latest <= WITHIN * 600


def test_time_is_kept_for_what_gained_together_only_where_two_seem_to_gain() -> None:
    budget = Budget(60.0, 0.0)
    costs = {name: Cost(5.0, (0.1,)) for name in ("as_is", "a", "b")}
    plans = [
        ArmPlan("as_is", as_it_is, fp8=True),
        *(ArmPlan(each, as_it_is, (each,), None, "as_is", explored=True) for each in "ab"),
    ]

    def until(a_ms: float, b_ms: float) -> float:
        samples = {("as_is", 0): [100.0] * 5, ("a", 0): [a_ms] * 5, ("b", 0): [b_ms] * 5}
        return conductor._window_until(samples, Plan((), (Cut({}),)), plans, costs, budget)

    assert until(90.0, 110.0) == until(110.0, 110.0) == budget.window_until(costs, [])
    assert until(90.0, 95.0) == budget.window_until(costs, ["a", "b"]) < until(90.0, 110.0)


def test_the_final_window_is_asked_for_the_time_that_was_kept_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What seemed to gain nothing may have compiled for long: it is not put together with anything."""
    found = {name: Interval(median, median, median) for name, median in (("a", 1.2), ("b", 1.1), ("c", 0.9))}
    kept: set[tuple[str, ...]] = set()
    asked: set[tuple[str, ...]] = set()

    def until(self: Budget, costs: Any, explored: Any) -> float:
        kept.add(tuple(explored))
        return 0.0

    def fits(self: Budget, costs: Any, explored: Any, spent_s: float) -> bool:
        asked.add(tuple(explored))
        return False

    monkeypatch.setattr(conductor, "gains", lambda *arguments: found)
    monkeypatch.setattr(Budget, "window_until", until)
    monkeypatch.setattr(Budget, "final_fits", fits)
    run(job(blocks=3), AS_IS, *(explored(name, as_it_is, AS_IS) for name in "abc"))
    assert kept == asked == {("a", "b")}


@pytest.mark.parametrize("window", ["first", "final"])
def test_fewer_rounds_than_the_interval_needs_are_not_called_reliable(
    window: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timer, "time", SimpleNamespace(perf_counter=CLOCK, monotonic=time.monotonic))
    latest = itertools.chain([0.0 if window == "first" else math.inf], itertools.repeat(0.0))
    monkeypatch.setattr(Budget, "window_latest", lambda self, costs: next(latest))
    result = trial(
        ticking(), AS_IS, TICKING_BF16, explored("a", faster(0.8), AS_IS), explored("b", faster(0.7), AS_IS)
    )
    assert {arm.name: len(arm.rounds_ms) for arm in result.arms if arm.name in ("prescribed", "a")} == {
        "prescribed": 1,
        "a": 1 if window == "first" else 5,
    }
    assert result.reliable is False
    assert (
        result.reason == "there was time for only 1 of the 5 rounds that an interval of 90% confidence needs"
    )


# What the process dies of is named before it begins, and what was known is kept.


def doing(part: list[str | None]) -> Callable[[str, str | None], None]:
    return lambda text, arm: part.append(arm if arm is not None else text)


def test_the_part_that_runs_is_named() -> None:
    said: list[str | None] = ["nothing"]
    ran: dict[str, list[str | None]] = {"eager": [], "other": []}

    def noting(name: str) -> Callable[[Variant], Variant]:
        def make(variant: Variant) -> Variant:
            forward = variant.model.forward

            def noted(tokens: torch.Tensor) -> torch.Tensor:
                ran[name].append(said[-1])
                return forward(tokens)

            variant.model.forward = noted  # type: ignore[method-assign]
            return variant

        return make

    laid_out: list[str | None] = []

    def loss(output: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        laid_out.append(said[-1])
        return output.float().mean()

    arms = [ArmPlan("as_is", noting("eager"), fp8=True), ArmPlan("other", noting("other"))]
    conduct(job(blocks=3, loss=loss), ["blocks"], arms, TrialRun(CPU, Budget(600), doing(said)))
    assert laid_out[0] == "copying the model to the device"
    assert list(dict.fromkeys(ran["eager"])) == ["as_is", "timing 2 variants of the step", BREAKDOWN]
    assert list(dict.fromkeys(ran["other"])) == ["other", "timing 2 variants of the step"]
    assert ran["other"][-1] == "other"
    assert said[1] == "noting the state of the model"
    assert said[-1] == "looking at what was changed"


def test_the_copy_of_the_check_is_not_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    proven: list[str] = []
    monkeypatch.setattr(
        profile_step, "prove", lambda step, device: proven.append(at[0].at_work) or StepProof(0, 0)
    )
    at: list[bench.Bench] = []
    made = bench.Bench.__init__
    monkeypatch.setattr(
        bench.Bench, "__init__", lambda self, *of, **how: (at.append(self), made(self, *of, **how))[1]
    )
    result = trial(
        job(blocks=3),
        AS_IS,
        BF16,
        ArmPlan("bf16_again", BF16.make, fp8=False),
        explored("unasked", BF16.make, BF16, ()),
    )
    assert result.self_check_ratio is not None
    assert "bf16_again" not in proven
    assert "unasked" in proven


def test_nothing_that_is_compared_is_profiled_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """What gained together is proven by the profile that explains it."""
    seen, proven = [], profile_step.Tracer.prove

    def noted(self: profile_step.Tracer, attempt: bench.Attempt, *, explain: bool = True) -> None:
        seen.append((attempt.plan.name, explain))
        proven(self, attempt, explain=explain)

    monkeypatch.setattr(profile_step.Tracer, "prove", noted)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timer, "time", SimpleNamespace(perf_counter=CLOCK, monotonic=time.monotonic))
        trial(
            ticking(),
            AS_IS,
            TICKING_BF16,
            explored("a", faster(0.8), AS_IS),
            explored("b", faster(0.7), AS_IS),
        )
    assert seen == [("as_is", True), ("bf16", True), ("a", False), ("b", False), ("prescribed", True)]


def lost_at(monkeypatch: pytest.MonkeyPatch, *parts: str) -> None:
    """A stand-in for a CUDA context that is gone: the question whether it is there, which a CPU always
    answers with yes."""

    def gone(device: torch.device, part: str) -> None:
        if part in parts:
            raise DeviceLost(part, "it took the GPU's context down: RuntimeError: planted")

    monkeypatch.setattr(conductor, "still_there", gone)


def test_a_context_that_is_gone_afterwards_is_harm_and_nothing_on_it_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lost_at(monkeypatch, "")
    digests: list[Job] = []
    monkeypatch.setattr(conductor, "digest", lambda of: digests.append(of) or {})
    result = trial(job(blocks=3, loss=lambda output, batch: output.nonsense), AS_IS)
    assert "the training step raises AttributeError" in (result.reason or "")
    assert (result.harm, result.reliable, len(digests)) == ((CONTEXT,), False, 1)


def test_the_arm_that_loses_the_device_while_all_are_timed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    lost_at(monkeypatch, "worn")
    with pytest.raises(DeviceLost) as lost:
        trial(job(blocks=3), AS_IS, worn())
    assert (lost.value.arm, lost.value.trial) == ("worn", None)


@pytest.mark.parametrize(
    "raised",
    [DeviceLost(NUMERICS, "it took the GPU's context down"), RuntimeError("worn out")],
    ids=["device lost", "raises"],
)
def test_a_device_that_is_lost_after_the_proofs_costs_no_time_that_is_known(
    raised: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> Trial:
        raise raised

    monkeypatch.setattr(conductor, "with_numerics", fails)
    monkeypatch.setattr(conductor, "still_there", lambda device, part: None)
    kept: list[Trial] = []
    of = TrialRun(CPU, Budget(600), keep=kept.append)
    if isinstance(raised, DeviceLost):
        with pytest.raises(DeviceLost) as lost:
            conduct(job(blocks=3), ["blocks"], [AS_IS, BF16], of)
        known = lost.value.trial
        assert known is not None
        assert known.gaps == {"trial.numerics": "it took the GPU's context down"}
    else:
        known = conduct(job(blocks=3), ["blocks"], [AS_IS, BF16], of)
    assert [(arm.name, arm.tried) for arm in known.arms[:2]] == [("as_is", True), ("bf16", True)]
    assert [arm.step_ms for arm in kept[-1].arms] == [arm.step_ms for arm in known.arms[:2]]


KNOWN = Trial(
    device="cpu",
    arms=(Arm(name="as_is", tried=True, step_ms=1.0),),
    reliable=True,
    reason=None,
    gaps={"trial.numerics": "planted"},
)


@pytest.mark.parametrize("known", [KNOWN, None], ids=["times are known", "nothing is known"])
def test_a_live_model_whose_device_is_lost_has_a_report_that_says_so(
    known: Trial | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loses(*_: object) -> Trial:
        lost = DeviceLost("numerics", "it took the GPU's context down: planted")
        lost.trial = known
        raise lost

    monkeypatch.setattr(fp8doctor.trial, "conduct", loses)
    of = job(blocks=1)
    found = inspect_model(
        of.model, of.batch, loss=of.loss, device="cpu", budget_s=1, select="NUM"
    ).facts.trial
    assert (found.harm, found.reliable) == ((CONTEXT,), False)
    assert CONTEXT in (found.reason or "")
    if known:
        assert found.arms == known.arms
        assert recorded(found, "shapes") or "trial.shapes" in found.gaps
        assert found.gaps["trial.numerics"] == "planted"
    else:
        assert (found.reason or "").startswith("numerics: it took the GPU's context down: planted")


def test_the_time_of_numerics_that_say_something_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights of one job have structure; those of the other are as an initialiser draws them."""
    seen: list[bool] = []
    rest = Budget.after_window_s
    monkeypatch.setattr(
        Budget, "after_window_s", lambda self, costs: (seen.append(self.numerics), rest(self, costs))[1]
    )
    trained, fresh = job(blocks=3), job(blocks=3)
    for parameter in trained.model.parameters():
        if parameter.dim() == 2:
            parameter.data *= torch.logspace(-1, 1, parameter.shape[0]).unsqueeze(1)
    measured, not_measured = (trial(of, AS_IS) for of in (trained, fresh))
    assert (seen[0], seen[-1]) == (True, False)
    assert recorded(measured, "numerics")
    assert "as an initialiser draws them" in not_measured.gaps["trial.numerics"]


def failing(error: Exception) -> ArmPlan:
    def make(variant: Variant) -> Variant:
        raise error

    return ArmPlan("failing", make)


@pytest.mark.parametrize(
    ("error", "why", "reason"),
    [
        (RuntimeError("shapes differ\nand more"), Reason.RAISES, "it raises RuntimeError: shapes differ"),
        (torch.OutOfMemoryError("CUDA out of memory"), Reason.DOES_NOT_FIT, "even beside bf16 alone"),
        (NotTried("torchao cannot be imported"), Reason.NOT_APPLICABLE, "torchao cannot be imported"),
        (NotReplicable("it is sharded"), Reason.NOT_REPLICABLE, "it is sharded"),
    ],
)
def test_an_arm_that_fails_costs_itself_only(error: Exception, why: Reason, reason: str) -> None:
    arms = run(job(blocks=3), AS_IS, failing(error), BF16)
    assert (arms["failing"].tried, arms["as_is"].tried, arms["bf16"].tried) == (False, True, True)
    assert (arms["failing"].why, arms["bf16"].why) == (why, None)
    assert reason in (arms["failing"].reason or "")


def test_where_nothing_could_be_built_every_variant_keeps_its_reason() -> None:
    too_large = failing(torch.OutOfMemoryError("CUDA out of memory"))
    found = trial(job(blocks=3), *(replace(too_large, name=name) for name in ("as_is", "bf16")))
    assert [(arm.name, arm.why) for arm in found.arms] == [
        ("as_is", Reason.OUT_OF_MEMORY),
        ("bf16", Reason.OUT_OF_MEMORY),
    ]
    assert found.why is None


def test_what_an_arm_raises_is_told_to_a_maintainer_only(
    logged: Records, capfd: pytest.CaptureFixture[str]
) -> None:
    logging.getLogger("fp8doctor").setLevel(logging.DEBUG)
    run(job(blocks=3), AS_IS, failing(RuntimeError("shapes differ")))
    assert "in make\n    raise error\nRuntimeError: shapes differ" in logged.text()
    assert "shapes differ" not in "".join(capfd.readouterr())


def test_an_arm_without_its_proof_has_no_number() -> None:
    arms = run(job(blocks=3), ArmPlan("as_is", BF16.make, fp8=True), ArmPlan("bf16", as_it_is, fp8=False))
    assert (arms["as_is"].why, arms["bf16"].why) == (Reason.NO_FP8_GEMM, Reason.FP8_IN_BF16)
    assert arms["as_is"].reason == "no FP8 GEMM was seen in its step"
    assert arms["bf16"].reason == "18 FP8 GEMMs were seen in a BF16 step"
    assert not arms["as_is"].tried


def test_an_arm_that_keeps_compiling_has_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "MOST_WARM_UP", 3)

    def make(variant: Variant) -> Variant:
        inner, count = torch.compile(lambda x: x + 1, dynamic=False, backend="eager"), [8]
        forward = variant.model.forward

        def growing(tokens: torch.Tensor) -> torch.Tensor:
            count[0] += 1
            inner(torch.zeros(count[0]))
            return forward(tokens)

        variant.model.forward = growing  # type: ignore[method-assign]
        return variant

    arm = run(job(blocks=3), ArmPlan("as_is", make))["as_is"]
    assert (arm.why, arm.reason) == (Reason.STILL_COMPILING, "it was still compiling while it was timed")


def test_what_the_budget_does_not_reach_is_said() -> None:
    arms = run(job(blocks=3), AS_IS, BF16, budget_s=0.0)
    assert arms["as_is"].tried
    assert arms["bf16"].why is Reason.NO_TIME_LEFT
    assert arms["bf16"].reason == "the budget of 0 s was used up before it"


def test_a_step_that_raises_is_the_trials_reason() -> None:
    result = trial(job(loss=lambda output, batch: output.nonsense), AS_IS)
    assert (result.arms, result.why) == ((), Reason.STEP_RAISES)
    assert "the training step raises AttributeError" in (result.reason or "")


class Sparse(nn.Module):
    """AdamW takes no sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(96, 16, sparse=True)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.embedding(tokens)  # type: ignore[no-any-return]


def test_an_optimizer_that_was_made_up_is_no_fault_of_the_step() -> None:
    model = Sparse()
    of = job(model=model, batch=torch.arange(8), loss=None)
    told = trial(of, AS_IS)
    assert told.why == Reason.NOT_REPLICABLE
    assert "the optimizer that was made up for it raises RuntimeError: Adam does not support" in str(
        told.reason
    )
    own = torch.optim.AdamW(model.parameters())
    assert trial(replace(of, optimizer=own), AS_IS).why == Reason.STEP_RAISES
    fits = torch.optim.SparseAdam(list(model.parameters()))
    assert trial(replace(of, optimizer=fits), AS_IS).why is None


class OneHelper(Nobody):
    """There until it is ended."""

    ended = 0

    def end(self) -> bool:
        self.ended += 1
        return self.ended == 1

    give_way = end

    def outcomes(self) -> dict[str, float | None]:
        return {"bf16_compiled": 8.0, "prescribed": None}


class LosesItsGpu(Nobody):
    """One arm cost it its GPU."""

    def lost(self, arm: str) -> str | None:
        return "it took the GPU's context down" if arm == "b" else None


@pytest.mark.parametrize(
    ("name", "compiled_ahead", "ended_before"),
    [
        ("float8_tensorwise", {}, True),
        ("recipe-rowwise", {"c": None}, True),
        ("recipe-rowwise", {"c": 8.0}, False),
        ("fused-optimizer", {}, False),
        ("bf16_compiled", {}, False),
        ("as_is", {}, False),
    ],
)
def test_nothing_is_compiled_ahead_of_a_trial_that_finds_its_variants_in_the_caches(
    name: str, compiled_ahead: dict[str, float | None], ended_before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The forms of the job itself may be there from its own training, and other changes keep its graphs."""
    others, ended = OneHelper(), set[bool]()
    monkeypatch.setattr(others, "outcomes", lambda: compiled_ahead)

    def noted(variant: Variant) -> Variant:
        ended.add(others.ended > 0)
        return variant

    of = Bench.build

    def built(self: Bench, attempt: Attempt, until: float = math.inf) -> None:
        of(self, attempt, until)
        for ready in attempt.ready:
            ready.compiled.from_caches = attempt.plan.name == name

    monkeypatch.setattr(Bench, "build", built)
    plans = [ArmPlan("as_is", as_it_is)] if name != "as_is" else []
    plans += [ArmPlan(name, as_it_is), ArmPlan("c", noted, base="as_is")]
    conduct(job(), ["blocks"], plans, TrialRun(CPU, Budget(600.0), ahead=others))
    assert ended == {ended_before}


@pytest.mark.parametrize(("budget_s", "others"), [(600.0, None), (1e-3, "no_time_left")])
def test_what_cost_another_process_its_gpu_is_not_built_here(budget_s: float, others: str | None) -> None:
    """The trial would begin again in a new process. It is the reason also where no time was left."""
    plans = [ArmPlan("as_is", as_it_is), ArmPlan("b", as_it_is, base="as_is"), ArmPlan("c", as_it_is)]
    run = TrialRun(CPU, Budget(budget_s), ahead=LosesItsGpu())
    found = conduct(job(), ["blocks"], plans, run)
    assert [(arm.name, arm.tried, arm.why) for arm in found.arms] == [
        ("as_is", True, None),
        ("b", False, "took_process_down"),
        ("c", others is None, others),
    ]
    assert found.arms[1].reason == "it took the GPU's context down"


class LosesItsGpuMeanwhile(LosesItsGpu):
    """It does so while the trial waits for it."""

    def __init__(self) -> None:
        self.waited_for: set[str] = set()

    def take(self, work: Work, patience_s: float | None) -> float | None:
        self.waited_for.add(work[0])
        return None

    def lost(self, arm: str) -> str | None:
        return super().lost(arm) if arm in self.waited_for else None


def test_what_costs_another_process_its_gpu_while_it_is_waited_for_is_not_built_here() -> None:
    def building(variant: Variant) -> Variant:
        raise AssertionError("it is built")

    plans = [ArmPlan("as_is", as_it_is), ArmPlan("b", building, base="as_is"), ArmPlan("c", as_it_is)]
    run = TrialRun(CPU, Budget(600.0), ahead=LosesItsGpuMeanwhile())
    found = conduct(job(), ["blocks"], plans, run)
    assert [(arm.name, arm.why) for arm in found.arms] == [
        ("as_is", None),
        ("b", Reason.TOOK_PROCESS_DOWN),
        ("c", None),
    ]


def test_a_step_that_raises_beside_helpers_is_tried_without_them() -> None:
    """cuBLAS and the driver have other words for a full GPU than torch's own exception."""

    class WithoutRoom(Decoder):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not helper.ended:
                raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)")
            return super().forward(x)

    helper = OneHelper()
    run = TrialRun(CPU, Budget(600.0), ahead=helper)
    found = conduct(job(model=WithoutRoom(3)), ["blocks"], [ArmPlan("as_is", as_it_is)], run)
    assert [(arm.name, arm.tried) for arm in found.arms] == [("as_is", True)]
    assert found.compiled_ahead == helper.outcomes()


def test_a_frozen_model_is_no_fault_of_its_step() -> None:
    frozen = job(blocks=3)
    frozen.model.requires_grad_(False)
    assert trial(frozen, AS_IS).reason == "no parameter of the model is trained, so there is no step to time"


def test_an_optimizer_that_needs_a_closure_is_no_fault_of_the_step() -> None:
    found = job(blocks=3)
    closed = replace(found, optimizer=torch.optim.LBFGS(found.model.parameters()))
    assert trial(closed, AS_IS).reason == (
        "its optimizer LBFGS takes a closure, and the steps that are timed give it none"
    )


def test_a_recompute_that_saves_other_tensors_is_told_apart() -> None:
    def loss(output: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        calls: list[None] = []

        def changing(given: torch.Tensor) -> torch.Tensor:
            calls.append(None)
            return given.exp().sin() if len(calls) == 1 else given * 2

        made: torch.Tensor = checkpoint(changing, output.float(), use_reentrant=False)  # type: ignore[no-untyped-call]
        return made.mean()

    result = trial(job(loss=loss), AS_IS)
    assert result.why is Reason.RECOMPUTE_DIFFERS
    assert (result.reason or "").startswith("the training step raises CheckpointError")


def test_without_a_batch_nothing_is_timed_and_no_step_is_blamed() -> None:
    result = trial(job(batch=None), AS_IS)
    assert (result.arms, result.why) == ((), Reason.NO_BATCH)
    assert result.reason == "there is no batch to run it on; give one, as example_batch() in a model file"


def worn(steps: int = 5) -> ArmPlan:
    """An arm that raises in the window, after so many steps."""

    def make(variant: Variant) -> Variant:
        forward, left = variant.model.forward, [steps]

        def ending(tokens: torch.Tensor) -> torch.Tensor:
            left[0] -= 1
            if not left[0]:
                raise RuntimeError("worn out")
            return forward(tokens)

        variant.model.forward = ending  # type: ignore[method-assign]
        return variant

    return ArmPlan("worn", make)


def test_a_variant_that_fails_while_it_is_timed_costs_itself_only() -> None:
    result = trial(job(blocks=3), AS_IS, worn())
    arms = {arm.name: arm for arm in result.arms}
    assert result.why is None
    assert len(arms["as_is"].rounds_ms) == timer.LEAST_ROUNDS
    assert (arms["worn"].tried, arms["worn"].why) == (False, Reason.RAISES)
    assert arms["worn"].reason == "it raises RuntimeError: worn out"


def test_a_step_that_fails_while_it_is_timed_leaves_a_reason() -> None:
    result = trial(job(blocks=3), replace(worn(), name="as_is"))
    assert (result.arms, result.why) == ((), Reason.TIMING_RAISES)
    assert result.reason == "a variant that had run before stopped the timing with RuntimeError: worn out"


def test_a_variant_that_fails_while_it_is_proven_costs_itself_only(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Tracer.trace

    def failing_trace(self: Tracer, attempt: Attempt) -> StepProof:
        if attempt.plan.name == "bf16":
            raise RuntimeError("worn out")
        return own(self, attempt)

    monkeypatch.setattr(Tracer, "trace", failing_trace)
    arms = {arm.name: arm for arm in trial(job(blocks=3), AS_IS, BF16).arms}
    assert arms["as_is"].tried
    assert (arms["bf16"].tried, arms["bf16"].reason) == (False, "it raises RuntimeError: worn out")


def test_what_changes_a_variant_that_failed_is_not_built() -> None:
    told: list[str | None] = []
    broken = replace(failing(RuntimeError("broken")), name="prescribed", treatments=("compile-blocks",))
    on_top = explored("recipe-rowwise", as_it_is, broken)
    of = TrialRun(CPU, Budget(600.0), progress=lambda text, arm: told.append(arm))
    result = conduct(job(blocks=3), ("blocks",), (AS_IS, broken, on_top), of)
    arms = {arm.name: arm for arm in result.arms}
    assert "recipe-rowwise" not in told
    assert (arms["recipe-rowwise"].why, arms["recipe-rowwise"].reason) == (
        Reason.RAISES,
        "it changes FP8 with all fixes, which has no time",
    )


class Skipping(Decoder):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks[0](self.embedding(tokens)))


def test_a_cut_whose_blocks_do_not_all_run_is_refused() -> None:
    result = trial(job(model=Skipping(26).bfloat16()), AS_IS)
    assert result.why is Reason.NOT_REPLICABLE
    assert "does not run all of them (3 are skipped)" in (result.reason or "")


def test_an_arm_to_skip_is_not_built() -> None:
    result = conduct(
        job(blocks=3),
        ["blocks"],
        [AS_IS, BF16],
        TrialRun(CPU, Budget(5), skip={"bf16": "the process was killed"}),
    )
    assert [(arm.name, arm.tried, arm.why, arm.reason) for arm in result.arms] == [
        ("as_is", True, None, None),
        ("bf16", False, Reason.TOOK_PROCESS_DOWN, "the process was killed"),
    ]


def digest(of: Job) -> list[object]:
    model = of.model
    return [
        [
            (name, tensor.clone(), tensor._version, tensor.requires_grad, tensor.grad)
            for name, tensor in model.state_dict(keep_vars=True).items()
        ],
        [
            (
                name,
                type(each),
                each.training,
                each._compiled_call_impl,
                list(each._forward_pre_hooks),
                "forward" in each.__dict__,
            )
            for name, each in model.named_modules()
        ],
        random.getstate(),
        numpy.random.get_state()[1].tolist(),
        torch.get_rng_state(),
        [len(_debug_get_cache_entry_list(each.forward.__code__)) for each in (Block, Decoder)],
        {kind: dict(counted) for kind, counted in torch._dynamo.utils.counters.items()},
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
    ]


def same(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def test_the_users_job_is_exactly_as_before() -> None:
    of = job()
    for block in of.model.blocks:
        block.compile(backend="aot_eager")
    before = digest(of)
    trial(of, AS_IS, BF16, PRESCRIBED, failing(RuntimeError("x")), budget_s=30)
    assert same(before, digest(of))


def test_a_users_optimizer_keeps_its_class_settings_and_state() -> None:
    of = job(blocks=3)
    of.optimizer = torch.optim.SGD(
        [{"params": of.model.blocks.parameters(), "momentum": 0.5}, {"params": of.model.head.parameters()}],
        lr=0.1,
    )
    before = of.optimizer.state_dict()
    assert run(of, AS_IS)["as_is"].tried
    assert of.optimizer.state_dict() == before


def test_accumulation_multiplies_the_work() -> None:
    of = job(blocks=3, workload=Workload(accumulate=3))
    assert run(of, AS_IS)["as_is"].fp8_gemms == 3 * 3 * 2 * 3
