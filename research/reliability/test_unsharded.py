"""Plain models of sharded ones: what they are made of, and that a step of theirs neither talks nor writes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.float8.float8_linear import Float8Linear

from fp8doctor.facts import Target, Workload
from fp8doctor.loading.job import Job
from fp8doctor.trial.copies.compiling import give_own_code
from fp8doctor.trial.copies.depth import plans
from fp8doctor.trial.copies.replica import NotReplicable, replicate
from fp8doctor.trial.copies.step import Variant, optimizer_for, training_step
from fp8doctor.trial.copies.unsharded import unsharded
from fp8doctor.trial.state.guard import Guard
from tests.checks.distributed.sharded import needs_a_sharded_step, processes

pytestmark = needs_a_sharded_step

CPU = torch.device("cpu")
X = torch.arange(1024.0).sin().reshape(16, 64)
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.up, self.down = nn.Linear(64, 128, bias=False), nn.Linear(128, 64, bias=False)
        self.register_buffer("table", torch.arange(64.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(torch.relu(self.up(self.norm(x)))) + self.table.to(x.dtype)
        return x + out


class Net(nn.Module):
    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(64, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        out: torch.Tensor = self.head(x)
        return out


@pytest.fixture(autouse=True)
def two_processes() -> Iterator[None]:
    with processes(2):
        yield


def fsdp2(change: Callable[[nn.Module], nn.Module] = lambda block: block) -> nn.Module:
    model = Net()
    for i, layer in enumerate(model.layers):
        model.layers[i] = change(layer)
        fully_shard(model.layers[i], mp_policy=BF16)
    return fully_shard(model, mp_policy=BF16)  # type: ignore[return-value]


def in_float8(all_gather: bool) -> Callable[[nn.Module], nn.Module]:
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=all_gather)
    return lambda block: convert_to_float8_training(block, config=config)


def fsdp1(original: bool = True) -> nn.Module:
    return FullyShardedDataParallel(
        Net(),
        use_orig_params=original,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        device_id=CPU,
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16),
    )


def trained(model: nn.Module) -> Job:
    """The job of a sharded model, which took a step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(X).float().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return Job(model=model, target=Target(), workload=Workload(accumulate=1), batch=X, optimizer=optimizer)


def stepped(job: Job) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A copy that took a step, which may neither talk nor write to the job."""
    plain = unsharded(job)
    assert plain.sharded is job
    model, memo = replicate(plain.model, device=CPU)
    optimizer = optimizer_for(plain, model.parameters(), memo)
    give_own_code(model)
    guard = Guard(plain)
    with guard.standing(), guard.armed():
        training_step(plain, Variant(model, job.batch, None, plain.around), optimizer, CPU)()
    return model, optimizer


SHARDED: dict[str, Callable[[], nn.Module]] = {
    "fsdp2": fsdp2,
    "fsdp2, FP8": lambda: fsdp2(in_float8(all_gather=False)),
    "fsdp2, FP8 all-gather": lambda: fsdp2(in_float8(all_gather=True)),
    "fsdp1": fsdp1,
}


@pytest.mark.parametrize("make", SHARDED.values(), ids=SHARDED)
def test_a_plain_model_steps_alone(make: Callable[[], nn.Module]) -> None:
    job = trained(make())
    model, optimizer = stepped(job)
    assert not any(isinstance(each, (FSDPModule, FullyShardedDataParallel)) for each in model.modules())
    assert {name: (type(each), tuple(each.shape), each.dtype) for name, each in model.named_parameters()} == {
        name: (nn.Parameter, tuple(each.shape), torch.bfloat16) for name, each in Net().named_parameters()
    }
    assert torch.equal(model.layers[1].table, torch.arange(64.0))  # type: ignore[index, union-attr]
    in_fp8 = [name for name, each in job.model.named_modules() if isinstance(each, Float8Linear)]
    assert [name for name, each in model.named_modules() if isinstance(each, Float8Linear)] == in_fp8
    assert all(bool(each.isfinite().all()) for each in model.parameters())
    moments = [state["exp_avg"] for state in optimizer.state.values()]
    assert sum(each.numel() for each in moments) == sum(each.numel() for each in model.parameters()) // 2
    assert {each.dtype for each in moments} == {torch.float32}
    assert all(bool(each.any()) for each in moments)


def test_a_deep_model_is_cut() -> None:
    model = Net(layers=26)
    for layer in model.layers:
        fully_shard(layer)
    plain = unsharded(Job(model=fully_shard(model), target=Target(), workload=Workload())).model
    shallow, deep = plans(plain, ["layers"])[0].cuts
    assert (shallow, deep) == ({"layers": 4}, {"layers": 12})
    copied, _ = replicate(plain, device=CPU, cuts=shallow)
    assert len(copied.layers) == 4  # type: ignore[arg-type]
    assert copied(X).shape == X.shape


def test_what_a_plain_model_cannot_stand_for_is_refused() -> None:
    mesh = init_device_mesh("cpu", (2,))
    split = parallelize_module(Block(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    job = Job(model=split, target=Target(), workload=Workload())
    with pytest.raises(NotReplicable, match="weight is split by tensor parallelism"):
        unsharded(job)
    with pytest.raises(NotReplicable, match="use_orig_params=False"):
        unsharded(replace(job, model=fsdp1(original=False)))
    batch = DTensor.from_local(X, mesh)
    with pytest.raises(NotReplicable, match="its batch is sharded"):
        unsharded(replace(job, model=fsdp2(), batch=batch))


class DeepSpeedEngine(nn.Module):
    """Stands in for DeepSpeed 0.19.8's under ZeRO 1 to 3, of which the last leaves no data in parameters."""

    __module__ = "deepspeed.runtime.engine"
    dp_world_size = 2

    def __init__(self, stage: int) -> None:
        super().__init__()
        self.module, self.stage = Net().bfloat16(), stage
        shared = sum(each.numel() for each in self.module.parameters()) // 2
        flat = [nn.Parameter(torch.zeros(shared))] if stage < 3 else []
        own = torch.optim.AdamW(flat or [nn.Parameter(torch.zeros(1))], lr=1e-3)
        if stage == 3:
            own.param_groups[0]["params"].clear()
            for each in self.module.parameters():
                each.ds_shape = each.shape  # type: ignore[attr-defined]
                each.data = torch.empty(0, dtype=each.dtype)
        self.optimizer: Any = SimpleNamespace(optimizer=own, param_groups=own.param_groups)

    def __del__(self) -> None:
        """It removes its hooks."""

    def zero_optimization_stage(self) -> int:
        return self.stage


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_zero_steps_its_share_of_plain_parameters(stage: int) -> None:
    engine = DeepSpeedEngine(stage)
    job = Job(
        model=engine, target=Target(), workload=Workload(accumulate=1), batch=X, optimizer=engine.optimizer
    )
    model, optimizer = stepped(replace(job, batch=X.bfloat16()))
    assert type(model) is not DeepSpeedEngine
    whole = {name: (tuple(each.shape), torch.bfloat16) for name, each in Net().named_parameters()}
    assert {name: (tuple(each.shape), each.dtype) for name, each in model.named_parameters()} == whole
    moments = [state["exp_avg"] for state in optimizer.state.values()]
    part = sum(each.numel() for each in model.parameters()) // (2 if stage else 1)
    assert (sum(each.numel() for each in moments), moments[0].dtype) == (part, torch.float32)
