"""Interleaving: every arm in turn, in an order that changes, until all are known well enough."""

import math
import random
import time
from types import SimpleNamespace

import pytest
import torch

from fp8doctor.facts.arm_names import ArmName, conversion_to
from fp8doctor.trial.copies.depth import WHOLE
from fp8doctor.trial.copies.step import Place, VariantPlan, as_it_is
from fp8doctor.trial.measure import timer
from fp8doctor.trial.measure.timer import (
    LEAST_ROUNDS,
    Block,
    Limits,
    block_ms,
    blocks,
    interleave,
    sign_is_open,
)

CPU = torch.device("cpu")


def now() -> float:
    """No time is left for more rounds."""
    return 0.0


def an_hour() -> float:
    return time.monotonic() + 3600


def test_every_arm_is_visited_in_turn_and_each_round_gives_one_sample(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rounds_taken = LEAST_ROUNDS + 1  # in which B has every place once
    monkeypatch.setattr(timer, "LEAST_ROUNDS", rounds_taken)
    order: list[str] = []
    samples = interleave(
        {(name, 0): (lambda name=name: order.append(name)) for name in "ABC"}, CPU, Limits(now())
    )
    assert {key: len(times) for key, times in samples.items()} == dict.fromkeys(
        [("A", 0), ("B", 0), ("C", 0)], rounds_taken
    )
    seen, number = "", 0
    while number < len(order):  # the first round knows no times, and a step that takes none settles longest
        seen += order[number]
        number += blocks([0.0 if len(seen) <= 3 else 1e-6])[0].steps
    rounds = [seen[at : at + 3] for at in range(0, len(seen), 3)]
    assert [sorted(each) for each in rounds] == [["A", "B", "C"]] * rounds_taken
    assert len({each.index("B") for each in rounds}) == 3


@pytest.mark.parametrize(
    ("soon", "latest", "told_at", "rounds", "asked"),
    [
        (math.inf, math.inf, 5, 15, [15]),  # no limit
        (0.0, math.inf, 5, 5, [5]),  # told by the least rounds
        (0.0, math.inf, 6, 10, [5, 10]),
        (0.0, math.inf, 999, 60, list(range(5, 60, 5))),
        (0.0, 41.0, 999, 20, [5, 10, 15]),
        (17.0, math.inf, 5, 8, [8]),  # told when the time is up
        (12.0, math.inf, 9, 10, [6, 10]),  # open when it was asked last
        (0.0, 7.0, 999, 3, []),  # not even the least rounds
        (0.0, 0.0, 999, 1, []),
    ],
)
def test_rounds_are_added_while_the_question_is_open(
    monkeypatch: pytest.MonkeyPatch,
    soon: float,
    latest: float,
    told_at: int,
    rounds: int,
    asked: list[int],
) -> None:
    """A round takes 2 s. It is asked once when the time is up, and then only after some rounds more."""
    now, noise, looks = [0.0], random.Random(1), []

    def ms_of(step: object, device: torch.device, block: Block, look: object) -> float:
        now[0] += 2.0
        return noise.uniform(1, 2)

    def is_open(samples: dict[tuple[str, int], list[float]]) -> bool:
        looks.append(len(samples["A", 0]))
        return looks[-1] < told_at

    monkeypatch.setattr(timer, "block_ms", ms_of)
    monkeypatch.setattr(timer, "time", SimpleNamespace(monotonic=lambda: now[0]))
    samples = interleave({("A", 0): lambda: None}, CPU, Limits(soon, latest), is_open=is_open)
    assert (len(samples["A", 0]), looks) == (rounds, asked)


AS_IS, COMPILED, NO_FP8, CONVERTED, PRESCRIBED, ALIKE, CHANGED = (
    VariantPlan(name, as_it_is, fp8=fp8, place=place)
    for name, fp8, place in (
        (ArmName.AS_IS, True, Place.AS_IS),
        (ArmName.BF16_COMPILED, False, Place.OTHER_BF16),
        (ArmName.AS_IS, False, Place.AS_IS),
        (conversion_to("tensorwise"), True, Place.PLAN),
        (ArmName.PRESCRIBED, True, Place.PLAN),
        (ArmName.BF16_PRESCRIBED, False, Place.PLAN),
        ("compile-blocks", True, Place.REST),
    )
)
LLAMA_7B = {AS_IS: [293.7, 308.6, 310.6, 306.0, 331.8], COMPILED: [400.0] * 5}
"""Transformer Engine's layers at full depth, as they were recorded beside another job of the host."""
FLUX_LIKE = {AS_IS: [67.6, 67.4, 67.0, 69.7, 63.0], COMPILED: [66.3, 65.6, 66.7, 65.8, 65.8]}
"""Five rounds on an H200 whose host was slow."""
NOISY = [8, 11, 10, 12, 9]


@pytest.mark.parametrize(
    ("arms", "is_open"),
    [
        (FLUX_LIKE, True),
        ({AS_IS: [20] * 5, COMPILED: [10] * 5}, False),
        ({AS_IS: [20] * 5, COMPILED: [10] * 5, PRESCRIBED: NOISY}, True),
        ({AS_IS: [20] * 5, COMPILED: [10] * 5, PRESCRIBED: [9] * 5}, False),
        ({AS_IS: [20] * 5, COMPILED: [10] * 5, PRESCRIBED: [9.8, 10.2, 10, 10, 10.1]}, False),
        ({AS_IS: [9] * 5, COMPILED: [10] * 5, PRESCRIBED: NOISY}, False),
        ({AS_IS: [20] * 5, COMPILED: [10] * 5, PRESCRIBED: NOISY, ALIKE: [7] * 5}, False),
        ({NO_FP8: [20] * 5, COMPILED: [10] * 5, CONVERTED: NOISY}, True),  # a conversion
        ({**LLAMA_7B, CHANGED: [329.9, 268.2, 278.3, 253.7, 298.9]}, False),  # no plan
        ({AS_IS: [10, 10.4, 9.9, 10, 9.9], COMPILED: [10] * 5}, False),
        ({AS_IS: NOISY}, False),
    ],
)
def test_the_sign_is_fp8_against_the_best_bf16(arms: dict[VariantPlan, list[float]], is_open: bool) -> None:
    samples = {(plan.name, 0): list(times) for plan, times in arms.items()}
    assert sign_is_open(samples, WHOLE, list(arms)) is is_open


def test_rounds_end_when_every_arm_is_known_sharply(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timer, "block_ms", lambda step, device, block, look: 10.0)
    samples = interleave({("A", 0): lambda: None, ("B", 0): lambda: None}, CPU, Limits(an_hour()))
    assert len(samples["A", 0]) == LEAST_ROUNDS


@pytest.mark.parametrize(
    ("steps_ms", "expected"),
    [
        ([0.0], [Block(1, 2)]),
        ([750.0], [Block(1, 1)]),
        ([751.0], [Block(0, 1)]),
        ([160.0, 800.0], [Block(1, 2), Block(0, 1)]),
        ([201.0], [Block(1, 1)]),
        ([200.0], [Block(1, 2)]),
        ([2.0], [Block(8, 8)]),
        ([10.0], [Block(8, 3)]),
        ([0.4, 1.1, 5.0], [Block(8, 8), Block(8, 8), Block(8, 6)]),
        ([90.0, 210.0, 149.0], [Block(1, 2), Block(1, 1), Block(2, 2)]),
    ],
)
def test_the_first_block_of_a_variant_waits_until_the_gpu_has_settled(
    steps_ms: list[float], expected: list[Block]
) -> None:
    assert blocks(steps_ms) == expected


def test_the_cuts_of_an_arm_follow_each_other_the_last_first(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[tuple[str, Block]] = []
    times_ms = {"a shallow": 25.0, "a deep": 50.0, "b": 240.0}

    def ms_of(step: str, device: torch.device, block: Block, look: object) -> float:
        order.append((step, block))
        return times_ms[step]

    monkeypatch.setattr(timer, "block_ms", ms_of)
    steps = {("a", 0): "a shallow", ("b", 0): "b", ("a", 1): "a deep"}
    interleave(steps, CPU, Limits(now()), expected_ms={("b", 0): 240.0})  # type: ignore[arg-type]
    together = [("a deep", Block(3, 2)), ("a shallow", Block(1, 2))]
    rounds = [order[at : at + 3] for at in range(0, len(order), 3)]
    assert len(rounds) == LEAST_ROUNDS
    assert sorted(rounds[0]) == sorted([("a deep", Block(1, 2)), together[1], ("b", Block(1, 1))])
    for each in rounds[1:]:
        assert each in ([*together, ("b", Block(1, 1))], [("b", Block(1, 1)), *together])


def test_the_first_steps_of_a_visit_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    now, waits = [0.0], iter([0.2, 0.1, 0.001, 0.001])

    def step() -> None:
        now[0] += next(waits)

    monkeypatch.setattr(timer, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    assert block_ms(step, CPU, Block(2, 2)) == pytest.approx(1.0)
    assert next(waits, None) is None
