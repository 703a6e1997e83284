"""The shapes of real converted models, timed on a CPU: the very code that a GPU runs, with the host's clock.

The deadline runs on a clock of the tests: how fast this machine is decides nothing.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
from torchao.float8.float8_training_tensor import LinearMMConfig

from fp8doctor.examine import examine
from fp8doctor.facts import Facts, LayerShape, Linear, Target, Trial, Workload, recorded
from fp8doctor.loading.job import Job
from fp8doctor.trial import conductor
from fp8doctor.trial.layers import linear_operations as operations
from fp8doctor.trial.layers import shapes
from fp8doctor.trial.measure import budget, timer
from fp8doctor.trial.measure.budget import Budget
from fp8doctor.trial.measure.trial_run import TrialRun
from fp8doctor.trial.planning import plan_variants
from tests.trial.conducted import conduct

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

CPU = torch.device("cpu")
TOKENS = 48


@pytest.fixture(autouse=True)
def few_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    in_time(monkeypatch)


def in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """No shape is left out for the time: a clock begins at 0 and is a millisecond later whenever it is
    read. No casts are compiled, unless with `quick_compiler`."""
    monkeypatch.setattr(shapes, "ROUNDS", shapes.FEWEST_ROUNDS)
    monkeypatch.setattr(shapes, "COMPILING_S", {"cpu": float("inf")})
    ticks = itertools.count()
    stopped = SimpleNamespace(monotonic=lambda: next(ticks) * 1e-3, perf_counter=time.perf_counter)
    monkeypatch.setattr(shapes, "time", stopped)
    monkeypatch.setattr(budget, "time", stopped)


@pytest.fixture
def quick_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo for real, which decides what is compiled again, and its graphs run as they are."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    monkeypatch.setattr(shapes, "COMPILING_S", {"cpu": 0.0})


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.up = (
            nn.Linear(64, 64, bias=False),
            nn.Linear(64, 16, bias=False),
            nn.Linear(64, 128, bias=False),
        )
        self.down = nn.Linear(128, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.q(x) + self.k(x).mean()))


def decoder(recipe: str = "tensorwise", frozen: bool = False) -> nn.Module:
    model = nn.Sequential(Block(), Block()).bfloat16()
    if frozen:
        model[1].requires_grad_(False)
    return convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name(recipe))


def job(model: nn.Module) -> Job:
    workload = Workload(
        batch_source="given", batch_size=TOKENS, sequence_length=None, tokens=TOKENS, accumulate=1
    )
    return Job(
        model=model, target=Target(), workload=workload, batch=torch.ones(TOKENS, 64, dtype=torch.bfloat16)
    )


def probed(model: nn.Module, seconds: float = 5.0) -> tuple[LayerShape, ...]:
    facts = examine(job(model))
    found, _ = shapes.time_shapes(facts, TrialRun(CPU, Budget(seconds)), until=seconds)
    return found


def test_every_distinct_shape_is_timed_once_the_largest_first() -> None:
    found = probed(decoder(frozen=True))
    sides = {(shape.k, shape.n, shape.trained): shape.layers for shape in found}
    assert sides == {
        (64, 128, True): ("0.up",),
        (128, 64, True): ("0.down",),
        (64, 64, True): ("0.q",),
        (64, 16, True): ("0.k",),
        (64, 128, False): ("1.up",),
        (128, 64, False): ("1.down",),
        (64, 64, False): ("1.q",),
        (64, 16, False): ("1.k",),
    }
    assert (found[-1].k, found[-1].n) == (64, 16)
    assert {(shape.m, shape.recipe) for shape in found} == {(TOKENS, "tensorwise")}
    assert all(shape.bf16_ms > 0 and shape.fp8_ms and shape.fp8_ms > 0 for shape in found)


@pytest.mark.parametrize(("recipe", "in_fp8"), [("tensorwise", 3), ("rowwise", 3), ("rowwise_with_gw_hp", 2)])
def test_every_gemm_of_a_shape_is_timed_apart(
    recipe: str, in_fp8: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def turns(bench: object, operations: Mapping[str, object], flushes: int = 0) -> dict[str, float]:
        return {each: 1.0 if each.endswith("fp8") else 4.0 for each in operations}

    monkeypatch.setattr(shapes.Timer, "turns", turns)
    for shape in probed(decoder(recipe, frozen=recipe == "tensorwise")):
        gemms = 3 if shape.trained else 2
        in_bf16 = max(gemms - in_fp8, 0)
        assert shape.bf16_ms == 4.0 * gemms
        assert shape.fp8_ms == gemms - in_bf16 + 4.0 * in_bf16, "the GEMM that stays in BF16 is a part of it"


@pytest.mark.gate("tensorwise")
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_casts_are_compiled_once_for_each_kind(recipe: str, quick_compiler: None) -> None:
    from torch._dynamo.utils import counters

    before = counters["stats"]["unique_graphs"]
    found = probed(decoder(recipe, frozen=recipe != "rowwise_with_gw_hp"), seconds=60)
    assert [shape.casts_ms is not None and shape.casts_ms > 0 for shape in found] == [True] * len(found)
    assert [shape.reason for shape in found] == [None] * len(found)
    assert counters["stats"]["unique_graphs"] - before == len({shape.trained for shape in found})


def test_shapes_of_a_graph_that_took_all_the_time_have_their_casts_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A GPU's first graph also loads the compiler, and a Llama's shapes are all in one."""
    now, compiled = [0.0], list[bool]()

    def compiled_casts(recipe: str, trained: bool, example: object) -> Callable[..., object]:
        compiled.append(trained)
        now[0] += 9.0
        return lambda *_: None

    monkeypatch.setattr(shapes, "COMPILING_S", {"cpu": 3.0})
    monkeypatch.setattr(shapes, "compiled_casts", compiled_casts)
    clock = SimpleNamespace(monotonic=lambda: now[0], perf_counter=time.perf_counter)
    monkeypatch.setattr(shapes, "time", clock)
    found = probed(decoder(frozen=True))
    assert compiled == [True]
    assert {shape.trained for shape in found if shape.casts_ms is not None} == {True}
    assert [shape.trained for shape in found if shape.casts_ms is None] == [False] * 4


def test_operands_are_laid_out_as_in_training() -> None:
    shape = LayerShape(m=48, k=64, n=32, recipe="tensorwise", trained=True)
    of = operations.Operands.of(shape, CPU)
    bf16, fp8 = operations.bf16_gemms(of, True), operations.fp8_gemms(of, shape, True)
    made = [(bf16[each]().shape, fp8[each]().shape) for each in bf16]  # type: ignore[attr-defined]
    assert made == [((48, 32),) * 2, ((48, 64),) * 2, ((32, 64),) * 2]
    exact, rounded = bf16["output"](), fp8["output"]()
    assert (exact - rounded).norm() / exact.norm() < 0.1  # type: ignore[operator]


def test_casts_are_those_of_torchao() -> None:
    of = operations.Operands(
        *(torch.randn(side, dtype=torch.bfloat16) for side in ((48, 64), (32, 64), (48, 32)))
    )
    input, weight, gradient = of.input, of.weight, of.gradient
    made = operations.casts("tensorwise", True, *operations.cast_arguments(of))
    wanted = [(input, torch.float8_e4m3fn), (gradient, torch.float8_e5m2), (weight, torch.float8_e4m3fn)]
    expected = [
        hp_tensor_to_float8_dynamic(tensor, dtype, LinearMMConfig())._data.float() for tensor, dtype in wanted
    ]
    into, grad, weights, again, into_t, grad_t = (each.float() for each in made)
    assert all(torch.equal(a, b) for a, b in zip((into, grad, weights), expected, strict=True))
    assert torch.equal(again, weights.t())
    assert torch.equal(into_t, into.t())
    assert torch.equal(grad_t, grad.t())


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed", "current"])
def test_every_operand_of_an_fp8_gemm_is_cast(recipe: str) -> None:
    shape = LayerShape(m=48, k=64, n=32, recipe=recipe, trained=True)
    tensors = operations.cast_arguments(operations.Operands.of(shape, CPU))
    sides = lambda trained: sorted(tuple(each.shape) for each in operations.casts(recipe, trained, *tensors))  # noqa: E731
    forward = [(32, 64), (48, 32), (48, 64), (64, 32)]
    assert sides(False) == forward
    assert sides(True) == (
        forward if recipe == "rowwise_with_gw_hp" else sorted([*forward, (64, 48), (32, 48)])
    )


def test_an_fp8_gemm_that_fails_costs_the_fp8_of_its_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    gemm = operations.scaled_mm

    def narrow_fails(a: torch.Tensor, b: torch.Tensor, *rest: Any, **fields: Any) -> torch.Tensor:
        if b.shape[1] == 16:
            raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED")
        return gemm(a, b, *rest, **fields)

    monkeypatch.setattr(operations, "scaled_mm", narrow_fails)
    found = {shape.layers[0]: shape for shape in probed(decoder())}
    assert (found["0.k"].fp8_ms, found["0.k"].casts_ms, found["0.k"].reason) == (
        None,
        None,
        "RuntimeError: CUBLAS_STATUS_NOT_SUPPORTED",
    )
    assert found["0.k"].bf16_ms > 0
    assert found["0.up"].fp8_ms


def test_a_worker_that_died_of_the_shapes_leaves_them_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conductor, "timed", lambda *given: given[-1].trial(arms=()))
    told: list[Any] = []
    skip = {"shapes": "the process was killed", "rows": "it too"}
    of = job(decoder())
    found = conductor.time_copies(
        of,
        examine(of),
        "cpu",
        lambda facts: (),
        Budget(600),
        lambda doing, part: told.append(part),
        skip=skip,
    )
    assert found
    made = found.trial
    assert not recorded(made, "shapes")
    assert made.gaps == {"trial.shapes": "the process was killed", "trial.rows": "it too"}
    assert {*told} == {None}, "neither part is begun"


def planted(model: nn.Module, *losing: str) -> tuple[Job, Facts]:
    """Facts of a real model with shapes as a GPU may have timed them: these layers lose, the others gain."""
    of = job(model)
    facts = examine(of)

    def shape(linear: Linear) -> LayerShape:
        fp8 = 2.0 if linear.name in losing else 0.5
        return LayerShape(
            m=TOKENS,
            k=linear.in_features,
            n=linear.out_features,
            recipe="tensorwise",
            trained=True,
            layers=(linear.name,),
            bf16_ms=1.0,
            fp8_ms=fp8,
            casts_ms=0.1,
            reason=None,
        )

    trial = Trial(
        device="cuda", gpu="NVIDIA H200", shapes=tuple(shape(linear) for linear in facts.network.linears)
    )
    return of, msgspec.structs.replace(facts, trial=trial)


def compiled(model: nn.Module) -> nn.Module:
    for block in model:  # type: ignore[attr-defined]
        block.compile(backend="eager")
    return model


def test_layers_that_lose_when_timed_are_tried_in_bf16_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timer, "MOST_ROUNDS", 2)
    monkeypatch.setattr(timer, "LEAST_ROUNDS", 2)
    of, facts = planted(compiled(decoder()), "0.k", "1.k")
    plans = {plan.name: plan for plan in plan_variants(facts, [], of)}
    plan = plans["keep-in-bf16"]
    assert (plan.base, plan.explored, plan.fp8) == ("as_is", True, True)
    arms = conduct(of, [], [plans["as_is"], plan], TrialRun(CPU, Budget(600))).arms
    assert [(arm.reason, arm.fp8_gemms) for arm in arms] == [(None, 8 * 3), (None, 6 * 3)]
    of, facts = planted(nn.Sequential(Block(), Block()).bfloat16(), "0.k")
    assert "keep-in-bf16" not in {plan.name for plan in plan_variants(facts, [], of)}, "it is in BF16"
