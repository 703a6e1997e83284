"""Which total becomes the prescription: made-up times of arms that are not built."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from fp8doctor.facts import Arm
from fp8doctor.facts.arm_names import Reason
from fp8doctor.facts.no_number import NoNumber
from fp8doctor.trial.combining import Window, best_total, references_of
from fp8doctor.trial.copies.depth import Cut, Plan
from fp8doctor.trial.measure.attempt import Attempt
from fp8doctor.trial.measure.results import _both_windows
from fp8doctor.trial.variant import ArmPlan, as_it_is

BLOCKWISE = ArmPlan(
    "prescribed", as_it_is, ("keep-in-bf16", "cache-off", "compile-blocks"), True, "as_is", compiled=True
)
OWN = ArmPlan("prescribed_as_compiled", as_it_is, ("keep-in-bf16", "cache-off"), True, "as_is", compiled=True)


@pytest.mark.parametrize(("own_ms", "stands"), [(8.0, True), (10.0, False), (12.0, False)])
def test_the_faster_form_of_the_prescription_stands(own_ms: float, stands: bool) -> None:
    times = {"as_is": 20.0, "prescribed": 10.0, OWN.name: own_ms}
    samples = {(name, 0): [ms + 0.01 * number for number in range(9)] for name, ms in times.items()}
    attempts = [Attempt(plan) for plan in (ArmPlan("as_is", as_it_is, fp8=True), BLOCKWISE, OWN)]
    tracer = cast(Any, SimpleNamespace(bench=SimpleNamespace(plan=Plan((), (Cut({}),)))))
    final = best_total(Window(tracer, attempts, samples), None)
    assert (final is not None) is stands
    if final:
        assert [(each.plan.name, each.plan.treatments) for each in final.attempts] == [
            ("prescribed", OWN.treatments)
        ]
        assert final.samples == {("prescribed", 0): samples[OWN.name, 0]}


def test_where_the_fixes_do_not_fit_together_the_best_that_fits_alone_is_prescribed() -> None:
    times = {"as_is": 20.0, "cache-off": 15.0, "compile-blocks": 12.0, "larger-batch": 25.0}
    samples = {(name, 0): [ms + 0.01 * number for number in range(9)] for name, ms in times.items()}
    alone = [ArmPlan(name, as_it_is, (name,), True, "as_is") for name in times if name != "as_is"]
    attempts = [Attempt(plan) for plan in (ArmPlan("as_is", as_it_is, fp8=True), *alone, BLOCKWISE)]
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
    plans = [ArmPlan("as_is", as_it_is, fp8=True)] + [
        ArmPlan(name, as_it_is, (name,), True, base, lambda of, name=name: done.append(name) or of, True)  # type: ignore[misc]
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
    ("treatments", "alike"),
    [
        (("cuda-graphs", "recipe-rowwise"), ["bf16_cuda_graphs"]),
        (("checkpointing-off", "keep-in-bf16"), ["bf16_without_checkpointing"]),
        (("cuda-graphs", "checkpointing-off"), []),
        (("keep-in-bf16",), []),
    ],
)
def test_bf16_with_what_helps_it_too_is_timed_once_more_beside_the_total(
    treatments: tuple[str, ...], alike: list[str]
) -> None:
    """A small Llama took 15 ms in BF16 in the first window of an H100, and 27 in the final one."""
    bf16 = ["bf16", "bf16_compiled", "bf16_without_checkpointing", "bf16_cuda_graphs"]
    attempts = [Attempt(ArmPlan(name, as_it_is, fp8=name == "as_is")) for name in ("as_is", *bf16)]
    window = Window(cast(Any, None), attempts, {(each.plan.name, 0): [1.0] for each in attempts})
    found = references_of(window, ArmPlan("prescribed", as_it_is, treatments, True))
    assert [each.plan.name for each in found] == ["as_is", "bf16", "bf16_compiled", *alike]
