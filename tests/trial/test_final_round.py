"""Which total becomes the prescription: made-up times of arms that are not built."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from fp8doctor.facts import Arm
from fp8doctor.facts.arm_names import Reason
from fp8doctor.facts.no_number import NoNumber
from fp8doctor.trial import final_round
from fp8doctor.trial.copies.depth import Cut, Plan
from fp8doctor.trial.final_round import Window, best_total
from fp8doctor.trial.measure.attempt import Attempt, Samples
from fp8doctor.trial.measure.budget import Budget
from fp8doctor.trial.measure.results import _both_windows
from fp8doctor.trial.measure.trial_run import TrialRun
from fp8doctor.trial.variant import VariantPlan, as_it_is

BLOCKWISE = VariantPlan(
    "prescribed", as_it_is, ("keep-in-bf16", "cache-off", "compile-blocks"), True, "as_is", compiled=True
)
OWN = VariantPlan(
    "prescribed_as_compiled", as_it_is, ("keep-in-bf16", "cache-off"), True, "as_is", compiled=True
)


@pytest.mark.parametrize(("own_ms", "stands"), [(8.0, True), (10.0, False), (12.0, False)])
def test_the_faster_form_of_the_prescription_stands(own_ms: float, stands: bool) -> None:
    times = {"as_is": 20.0, "prescribed": 10.0, OWN.name: own_ms}
    samples = {(name, 0): [ms + 0.01 * number for number in range(9)] for name, ms in times.items()}
    attempts = [Attempt(plan) for plan in (VariantPlan("as_is", as_it_is, fp8=True), BLOCKWISE, OWN)]
    tracer = cast(Any, SimpleNamespace(bench=SimpleNamespace(plan=Plan((), (Cut({}),)))))
    final = best_total(Window(tracer, attempts, samples), None)
    assert (final is not None) is stands
    if final:
        assert [(each.plan.name, each.plan.treatments) for each in final.attempts] == [
            ("prescribed", OWN.treatments)
        ]
        assert final.samples == {("prescribed", 0): samples[OWN.name, 0]}
        assert not final.timed_again


def test_where_the_fixes_do_not_fit_together_the_best_that_fits_alone_is_prescribed() -> None:
    times = {"as_is": 20.0, "cache-off": 15.0, "compile-blocks": 12.0, "larger-batch": 25.0}
    samples = {(name, 0): [ms + 0.01 * number for number in range(9)] for name, ms in times.items()}
    alone = [VariantPlan(name, as_it_is, (name,), True, "as_is") for name in times if name != "as_is"]
    attempts = [Attempt(plan) for plan in (VariantPlan("as_is", as_it_is, fp8=True), *alone, BLOCKWISE)]
    attempts[-1].no_number = NoNumber(Reason.DOES_NOT_FIT, "its step takes 93.0 GiB")
    tracer = cast(Any, SimpleNamespace(bench=SimpleNamespace(plan=Plan((), (Cut({}),)))))
    final = best_total(Window(tracer, attempts, samples), None)
    assert final
    assert [(each.plan.name, each.plan.treatments) for each in final.attempts] == [
        ("prescribed", ("compile-blocks",))
    ]
    kept = _both_windows(
        [Arm(name=each.plan.name, base=None, tried=not each.why, why=each.why) for each in attempts],
        [Arm(name="prescribed", base=None, tried=True)],
    )
    assert [each.name for each in kept if each.name.startswith("prescribed")] == [
        "prescribed",
        "prescribed_first",
    ]


@pytest.mark.parametrize(
    ("blocks_ms", "recipe_ms", "prescribed"),
    [
        (22.0, 15.0, ("compile-blocks", "recipe-tensorwise")),  # blocks alone cost time
        (15.0, 12.0, ("compile-blocks", "recipe-tensorwise")),
        (12.0, 12.0, ("compile-blocks",)),  # the recipe adds nothing
        (30.0, 25.0, None),  # faster by block, and slower than the graph
        (22.0, 24.0, None),
    ],
)
def test_a_recipe_that_was_timed_by_block_is_prescribed_with_the_blocks(
    blocks_ms: float, recipe_ms: float, prescribed: tuple[str, ...] | None
) -> None:
    times = {"as_is": 20.0, "compile-blocks": blocks_ms, "recipe-tensorwise": recipe_ms}
    samples = {(name, 0): [ms + 0.01 * number for number in range(9)] for name, ms in times.items()}
    done: list[str] = []
    plans = [VariantPlan("as_is", as_it_is, fp8=True)] + [
        VariantPlan(name, as_it_is, (name,), True, base, lambda of, name=name: done.append(name) or of, True)  # type: ignore[misc]
        for name, base in (("compile-blocks", "as_is"), ("recipe-tensorwise", "compile-blocks"))
    ]
    tracer = cast(Any, SimpleNamespace(bench=SimpleNamespace(plan=Plan((), (Cut({}),)))))
    final = best_total(Window(tracer, list(map(Attempt, plans)), samples), None)
    assert (tuple(final.attempts[0].plan.treatments) if final else None) == prescribed
    if final and prescribed:
        final.attempts[0].plan.make(cast(Any, None))
        assert tuple(done) == prescribed, "the arm that applies it does what was timed"
        assert final.samples == {("prescribed", 0): samples[prescribed[-1], 0]}


@pytest.mark.parametrize(
    ("won", "alike"), [("cuda-graphs", ["bf16_cuda_graphs"]), ("keep-in-bf16", [])], ids=["shared", "own"]
)
def test_the_fair_bf16_is_timed_in_the_window_of_the_prescription(
    won: str, alike: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two windows share no clocks, and a host may be half as fast in the second."""
    times = {"as_is": 40.0, "bf16_compiled": 20.0, won: 12.0, "bf16_cuda_graphs": 8.0, "recipe-rowwise": 30.0}
    samples = {(name, 0): [ms + 0.01 * number for number in range(9)] for name, ms in times.items()}
    plans = [
        VariantPlan("as_is", as_it_is, fp8=True),
        VariantPlan("bf16_compiled", as_it_is, fp8=False),
        VariantPlan(won, as_it_is, (won,), True, "as_is", as_it_is, explored=True),
        VariantPlan("bf16_cuda_graphs", as_it_is, (), False, "bf16_compiled", explored=True),
        VariantPlan("recipe-rowwise", as_it_is, ("recipe-rowwise",), True, "as_is", as_it_is, explored=True),
    ]
    windows: list[list[str]] = []

    def in_turn(tracer: Any, attempts: list[Attempt], *until: object) -> Samples:
        windows.append([each.plan.name for each in attempts])
        return {(each.plan.name, 0): [20.0, 20.1, 20.2] for each in attempts}

    monkeypatch.setattr(final_round, "time_in_turn", in_turn)
    monkeypatch.setattr(final_round, "beyond_gpu", lambda *of: None)
    bench = SimpleNamespace(
        plan=Plan((), (Cut({}),)), build=lambda *of: None, device=torch.device("cpu"), drop=lambda *of: None
    )
    run = TrialRun(torch.device("cpu"), Budget(60))
    tracer = cast(Any, SimpleNamespace(bench=bench, run=run, prove=lambda *of, **how: None))
    final = best_total(Window(tracer, list(map(Attempt, plans)), samples), None)
    assert windows == [["as_is", "bf16_compiled", *alike, "prescribed", "combination"]]
    assert final
    assert [each.plan.name for each in final.attempts] == windows[0]
    assert final.timed_again


def test_the_bf16_of_the_first_window_is_kept_for_what_was_timed_there_alone() -> None:
    names = ["as_is", "bf16", "bf16_compiled", "recipe-rowwise"]
    first = [
        Arm(name=name, base="as_is" if "recipe" in name else None, tried=True, why=None) for name in names
    ]
    final = [Arm(name=name, base=None, tried=True, why=None) for name in (*names[:3], "prescribed")]
    assert [each.name for each in _both_windows(first, final)] == [
        *(*names[:3], "prescribed"),
        *("as_is_first", "bf16_first", "bf16_compiled_first", "recipe-rowwise"),
    ]
    alone = _both_windows(first[:3], [*final[:3], final[3]])
    assert [each.name for each in alone] == [*names[:3], "prescribed"], "nothing is held to them"
