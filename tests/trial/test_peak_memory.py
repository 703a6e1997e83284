"""What an arm's memory is made of: tensors of real replicas and optimizers counted, and the parts at full
depth."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.optim import AdamW8bit

from fp8doctor.facts import MemoryParts, Target, Workload
from fp8doctor.loading.job import Job
from fp8doctor.trial.copies.depth import Cut, Plan, Stack
from fp8doctor.trial.measure.attempt import Attempt
from fp8doctor.trial.measure.bench import Bench
from fp8doctor.trial.measure.peak_memory import (
    Held,
    Turn,
    Turns,
    full_peak,
    gib,
    gradients_of,
    held,
    memory_parts,
)
from fp8doctor.trial.planning import as_it_is
from fp8doctor.trial.state.guard import Guard
from fp8doctor.trial.variant import VariantPlan
from tests.trial.decoder import Decoder

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
OTHER = torch.device("cuda")
PLAN = Plan((Stack("blocks", 32, 0, 1),), (Cut({"blocks": 4}), Cut({"blocks": 12})))


def bytes_of(value: float | None) -> int:
    assert value is not None
    return round(value * 2**30)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Held:
    """One step, and what is held."""
    with gradients_of(model, optimizer, CPU) as gradients:
        model(torch.ones(32, 32)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return held(model, optimizer, gradients.found_gib, CPU)


def linears() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64, bias=False), nn.Linear(64, 32, bias=False))


@pytest.mark.parametrize(
    ("convert", "copies"),
    [
        (lambda model: model, 0),
        (convert_to_float8_training, 0),
        (
            lambda model: convert_to_float8_training(
                model, config=Float8LinearConfig(enable_fsdp_float8_all_gather=True)
            ),
            0,
        ),
    ],
    ids=["ordinary", "torchao casts anew", "torchao wraps"],
)
def test_parts_of_a_step(convert: Callable[[nn.Module], nn.Module], copies: int) -> None:
    model = convert(linears())
    parts = step(model, torch.optim.AdamW(model.parameters()))
    weights = 4 * 2 * 32 * 64
    assert (bytes_of(parts.weights_gib), bytes_of(parts.gradients_gib), bytes_of(parts.fp8_copies_gib)) == (
        weights,
        weights,
        copies,
    )
    assert bytes_of(parts.optimizer_gib) == 2 * weights + 2 * 4, "two moments and a counter for each weight"


def test_an_8_bit_optimizer_is_counted_by_what_it_stores() -> None:
    """Its states say float32; inside are one byte for each value and the scales."""
    model = nn.Sequential(nn.Linear(32, 512, bias=False), nn.Linear(512, 32, bias=False))
    optimizer = AdamW8bit(model.parameters())
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    with torch.compiler.set_stance("force_eager"):  # it compiles its step, which takes half a minute
        optimizer.step()
    found = bytes_of(held(model, optimizer, None, CPU).optimizer_gib)
    values = 2 * 2 * 32 * 512
    assert values < found < 1.3 * values


HOLDS = [Held(1.0, 0.5, 2.0, 1.0), Held(2.0, 1.5, 4.0, 2.0)]


def test_parts_at_full_depth_add_up_to_the_peak() -> None:
    peak = at_full_depth([8.0, 16.0], HOLDS)
    parts = memory_parts(PLAN, peak, HOLDS)
    assert peak == pytest.approx(36.0)
    assert parts is not None
    assert (
        parts.weights_gib,
        parts.fp8_copies_gib,
        parts.gradients_gib,
        parts.optimizer_gib,
    ) == pytest.approx((4.5, 4.0, 4.5, 9.0))
    assert parts.activations_gib == pytest.approx(14.0)
    assert sum(
        getattr(parts, field) for field in MemoryParts.__struct_fields__ if field.endswith("_gib")
    ) == pytest.approx(peak)


def peak_of(activations: float, gradients: float, embedding: float, logits: float, blocks: int) -> float:
    """Walk through a backward: it begins with the logits' gradient, each block gives its activations for its
    gradients, and the embedding's gradients come last."""
    allocated = [activations * blocks + logits]
    allocated += [activations * (blocks - done) + gradients * done for done in range(1, blocks + 1)]
    return max(*allocated, gradients * blocks + embedding)


@pytest.mark.parametrize(
    ("activations", "gradients", "embedding", "logits"),
    [
        (1.0, 0.2, 0.0, 0.0),
        (1.0, 0.2, 0.0, 3.0),
        (0.2, 1.0, 0.0, 3.0),
        (0.2, 1.0, 5.0, 30.0),
        (1.0, 0.2, 6.0, 0.0),
        (1.0, 0.2, 20.0, 0.0),
        (1.0, 0.9, 2.0, 0.5),
    ],
)
def test_the_peak_at_full_depth_is_not_below_the_true_one(
    activations: float, gradients: float, embedding: float, logits: float
) -> None:
    """Wherever the backward has its peak with few blocks."""
    depths, at = (4, 12), (activations, gradients, embedding, logits)
    peaks = [peak_of(*at, blocks) for blocks in depths]
    holds = [Held(0.0, 0.0, 0.0, gradients * blocks + embedding) for blocks in depths]
    turns = [Turn(activations * blocks, activations * blocks) for blocks in depths]
    found, true = full_peak(PLAN, peaks, holds, turns), peak_of(*at, 32)
    assert found is not None
    assert true - 1e-9 <= found <= 1.35 * true


def at_full_depth(peaks: list[float | None], holds: list[Held]) -> float | None:
    return full_peak(PLAN, peaks, holds)


def warm(bench: Bench) -> list[Held]:
    attempt = Attempt(VariantPlan("as_is", as_it_is))
    bench.build(attempt)
    assert attempt.no_number is None
    return [ready.held for ready in attempt.ready]


def test_an_arm_of_the_bench_at_both_cuts_and_at_full_depth() -> None:
    model = convert_to_float8_training(Decoder(26))
    job = Job(
        model=model,
        target=Target(),
        workload=Workload(accumulate=2),
        batch=torch.randint(0, 96, (1, 16)),
        loss=lambda output, batch: output.mean(),
    )
    bench = Bench(job, ["blocks"], CPU)
    try:
        holds = warm(bench)
        weights = sum(4 * each.numel() for each in model.parameters())
        parts = memory_parts(bench.plan, 1.0, holds)
        assert parts is not None
        assert (bytes_of(parts.weights_gib), bytes_of(parts.gradients_gib), parts.fp8_copies_gib) == (
            weights,
            weights,
            0.0,
        )
        assert bytes_of(parts.optimizer_gib) == pytest.approx(2 * weights, rel=1e-3)
        assert all(each.static_gib < each.least_gib for each in holds)
    finally:
        bench.close()


class Counters:
    """A stand-in for CUDA's allocator: what was allocated before the step, and the peak in it."""

    def __init__(self, before: int, peak: int) -> None:
        self.before, self.peak = before, peak

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device=None: None)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device=None: self.before)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device=None: self.peak)
        monkeypatch.setattr(torch.cuda, "memory_stats", lambda device=None: {})


@pytest.mark.parametrize(("rounded", "more"), [(0.0, 0.0), (0.25, 0.5)])
def test_the_peak_is_that_of_the_arm_alone(
    rounded: float, more: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies that an arm keeps, and gradients that nobody clears, were allocated before the step; they are
    the arm's own. Weights take what the allocator gives them."""
    model = nn.Sequential(nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False))
    optimizer = torch.optim.SGD([model[0].weight], momentum=0.9)

    def train() -> torch.Tensor:
        loss = model(torch.ones(32, 32)).sum()
        turns.note()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    bench = Bench.__new__(Bench)
    bench.device, bench.at_work, bench._handed_out = OTHER, "as_is", []
    bench.interrupts = False
    bench._rounding = rounded
    bench.job = Job(nn.Identity(), Target(kind="live", name="Sequential"), Workload())
    bench.guard = Guard(bench.job)
    Counters(before=5 * 2**30, peak=7 * 2**30).install(monkeypatch)
    monkeypatch.setattr("fp8doctor.trial.measure.peak_memory.gib", lambda tensors, device: gib(tensors, CPU))
    turns = Turns(OTHER)
    turns.note()
    assert turns.above(0.0) is None, "it was not told to note anything"
    ready = bench._warm(train, model, optimizer, turns)
    weight = 4 * 32 * 32 / 2**30
    assert ready.held == Held(2 * weight, 0.0, weight, 2 * weight)
    floor = (4 + more) * weight
    assert ready.peak_gib == pytest.approx(floor + 2.0)
    assert ready.turn == Turn(pytest.approx(floor), pytest.approx(floor + 2.0))  # type: ignore[arg-type]
    noted = turns.allocated
    turns.note()
    assert turns.allocated == noted, "no step of the window notes anything"
