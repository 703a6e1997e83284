"""What an arm's memory is made of: tensors of real replicas and optimizers counted, and the parts at full
depth."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.optim import AdamW8bit

from fp8doctor.facts import Target, Workload
from fp8doctor.facts.arm_names import Reason
from fp8doctor.loading.job import Job
from fp8doctor.trial.copies.depth import WHOLE, Plan, Stack
from fp8doctor.trial.copies.step import VariantPlan, as_it_is, before_the_update
from fp8doctor.trial.measure import memory
from fp8doctor.trial.measure.attempt import Attempt, Ready, beyond_gpu
from fp8doctor.trial.measure.bench import Bench
from fp8doctor.trial.measure.budget import Budget, TrialRun
from fp8doctor.trial.measure.evidence import Compilations
from fp8doctor.trial.measure.memory import MemoryWatch, StepMemory, full_peak, gib, memory_parts
from fp8doctor.trial.state.guard import Guard

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
OTHER = torch.device("cuda")
PLAN = Plan((Stack("blocks", 32, 0, 1),), ({"blocks": 4}, {"blocks": 12}))


def bytes_of(value: float | None) -> int:
    assert value is not None
    return round(value * 2**30)


def gathered_in_fp8(model: nn.Module) -> nn.Module:
    return convert_to_float8_training(model, config=Float8LinearConfig(enable_fsdp_float8_all_gather=True))


@pytest.mark.parametrize("convert", [nn.Sequential, convert_to_float8_training, gathered_in_fp8])
def test_parts_of_a_step(convert: Callable[[nn.Module], nn.Module]) -> None:
    model = convert(nn.Sequential(nn.Linear(32, 64, bias=False), nn.Linear(64, 32, bias=False)))
    optimizer = torch.optim.AdamW(model.parameters())
    watch = MemoryWatch(model, optimizer, CPU)
    with before_the_update(optimizer, watch.at_update):
        model(torch.ones(32, 32)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    parts = watch.end(None)
    weights = 4 * 2 * 32 * 64
    assert [bytes_of(each) for each in (parts.weights_gib, parts.gradients_gib)] == [weights, weights]
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
    found = bytes_of(MemoryWatch(model, optimizer, CPU).end(None).optimizer_gib)
    values = 2 * 2 * 32 * 512
    assert values < found < 1.3 * values


HOLDS = [
    StepMemory(1.5, 2.0, 1.0, peak_gib=8.0),
    StepMemory(3.5, 4.0, 2.0, peak_gib=16.0),
]


def test_parts_at_full_depth_add_up_to_the_peak() -> None:
    peak = full_peak(PLAN, HOLDS)
    parts = memory_parts(PLAN, peak, HOLDS)
    assert peak == pytest.approx(36.0)
    assert parts is not None
    held = (parts.weights_gib, parts.gradients_gib, parts.optimizer_gib)
    assert held == pytest.approx((8.5, 4.5, 9.0))
    assert parts.activations_gib == pytest.approx(14.0)
    assert sum(held) + parts.activations_gib == pytest.approx(peak)


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
        (0.2, 1.0, 0.0, 3.0),
        (0.2, 1.0, 5.0, 30.0),
        (1.0, 0.2, 20.0, 0.0),
    ],
)
def test_the_peak_at_full_depth_is_not_below_the_true_one(
    activations: float, gradients: float, embedding: float, logits: float
) -> None:
    """Wherever the backward has its peak with few blocks."""
    depths, at = (4, 12), (activations, gradients, embedding, logits)
    seen = [
        StepMemory(
            *(0.0, 0.0, gradients * blocks + embedding, peak_of(*at, blocks)),
            *(activations * blocks, activations * blocks),
        )
        for blocks in depths
    ]
    found, true = full_peak(PLAN, seen), peak_of(*at, 32)
    assert found is not None
    assert true - 1e-9 <= found <= 1.35 * true


@pytest.mark.parametrize(("rounded", "more"), [(0.0, 0.0), (0.25, 0.5)])
@pytest.mark.parametrize("workspaces", [0.0, 0.25])
def test_the_peak_is_that_of_the_arm_alone(
    rounded: float, more: float, workspaces: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies that an arm keeps, the batch, gradients that nobody clears, and what cuBLAS took for an arm
    before were allocated before the step; they are the arm's own. Weights take what the allocator gives
    them."""
    model = nn.Sequential(nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False))
    optimizer = torch.optim.SGD([model[0].weight], momentum=0.9)
    batch = {"x": torch.ones(32, 32)}

    def train() -> torch.Tensor:
        loss = model(batch["x"]).sum()
        watch.at_backward()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    bench = Bench.__new__(Bench)
    bench.run = TrialRun(OTHER, Budget(600.0))
    bench.device = OTHER
    bench._rounding = rounded
    bench.job = Job(nn.Identity(), Target(kind="live", name="Sequential"), Workload())
    bench.guard = Guard(bench.job)
    allocated_gib = [5.0 + workspaces]
    for name, answer in {
        "synchronize": lambda device=None: None,
        "reset_peak_memory_stats": lambda device=None: None,
        "memory_allocated": lambda device=None: allocated_gib[-1] * 2**30,
        "max_memory_allocated": lambda device=None: (7.0 + workspaces) * 2**30,
        "memory_stats": lambda device=None: {},
    }.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    monkeypatch.setattr(
        torch._C, "_cuda_clearCublasWorkspaces", lambda: allocated_gib.append(5.0), raising=False
    )
    monkeypatch.setattr(memory, "gib", lambda tensors, device: gib(tensors, CPU))
    watch = MemoryWatch(model, optimizer, OTHER, batch)
    found = bench._warm(train, watch).memory
    weight = 4 * 32 * 32 / 2**30
    floor = (4 + more) * weight + weight  # a batch is as large as a weight
    assert found == StepMemory(
        2 * weight,
        weight,
        2 * weight,
        peak_gib=pytest.approx(floor + 2.0 + workspaces),
        backward_gib=pytest.approx(floor),
        forward_peak_gib=pytest.approx(floor + 2.0 + workspaces),
    )


def test_what_a_job_holds_apart_from_its_model_is_part_of_its_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    """The frozen reference of a DPO, of which a trial on an H200 said nothing: 1.8 of 15.8 GiB."""
    model, reference = nn.Linear(32, 32, bias=False), nn.Linear(32, 64, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(32, 32)).sum().backward()
    optimizer.step()
    weight = 4 * 32 * 32
    counter = 4
    there = [4 * weight + counter + weight + 2 * weight]
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device=None: there[-1])
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device=None: {})
    monkeypatch.setattr(memory, "gib", lambda tensors, device: gib(tensors, CPU))
    batch = {"x": torch.ones(32, 32)}
    job = Job(model, Target(), Workload(), batch=batch, optimizer=optimizer)
    held = memory.held_apart(job, OTHER)
    assert bytes_of(held) == sum(each.nbytes for each in reference.parameters())
    assert memory.held_apart(job, CPU) == 0.0
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device=None: there[-1])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device=None: None)
    peaks = []
    for apart_gib in (0.0, held):
        watch = MemoryWatch(model, optimizer, OTHER, batch, apart_gib)
        watch.begin()
        peaks.append(watch.end(0.0).peak_gib or 0.0)
    assert peaks[1] - peaks[0] == pytest.approx(held)


DEPTHS = Plan((Stack("blocks", 10, 0, 1),), ({"blocks": 2}, {"blocks": 4}))
"""Two blocks more take twenty GiB more below: the whole model 40 + 4 * 20 = 120."""


def built(name: str, *treatments: str, more_gib: float = 0.0) -> Attempt:
    """Make an arm that was built at both cuts and takes so much more than the step as it is at each."""

    def at(peak_gib: float) -> Ready:
        held = StepMemory(4.0, 8.0, 4.0, peak_gib)
        return Ready(lambda: torch.zeros(()), None, Compilations(), held, 0.0, None, None)

    plan = VariantPlan(name, as_it_is, treatments, base=None if name == "as_is" else "as_is")
    return Attempt(plan, [at(each + more_gib) for each in (40.0, 60.0)])


AT_CUTS = built("as_is")


@pytest.mark.parametrize(
    ("arm", "gib", "fits"),
    [
        (built("a", "checkpointing-off", more_gib=5.0), None, True),  # a CPU
        (built("a", "checkpointing-off", more_gib=5.0), 132.0, True),
        (built("a", "checkpointing-off", more_gib=5.0), 131.0, False),  # it may not fill all
        (built("a", "cache-off", more_gib=0.5), 126.0, True),  # hardly more than the step as it is
        (built("a", "cache-off", more_gib=5.0), 100.0, False),
        (built("bf16", more_gib=5.0), 125.0, True),
        (built("bf16", more_gib=5.0), 124.0, False),
        (built("bf16", more_gib=5.0), 119.0, True),  # both are of a job that runs elsewhere
        (built("without_adapters", more_gib=50.0), 121.0, True),  # prescribed by nobody
    ],
)
def test_what_is_predicted_to_exceed_the_gpu_at_full_depth_has_no_number(
    arm: Attempt, gib: float | None, fits: bool
) -> None:
    found = beyond_gpu(arm, [AT_CUTS, arm], DEPTHS, gib)
    assert (found is None) is fits
    assert beyond_gpu(arm, [AT_CUTS, arm], WHOLE, gib) is None, "what was run whole fits"
    if found:
        assert found.why is Reason.DOES_NOT_FIT
