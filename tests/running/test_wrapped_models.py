"""The observer on models and optimizers that a library has wrapped, and on a library's trainer."""

from __future__ import annotations

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from fp8doctor.running.observer import ScriptObserver
from tests.running.conftest import STEPS, WARMUP, Heard
from tests.running.loops import Net, Slow, train
from tests.stand_ins.deepspeed_optimizer import ZeroOptimizer


def test_a_wrapped_model(observer: ScriptObserver, heard: Heard) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        train(DistributedDataParallel(Net()), WARMUP + STEPS)
    finally:
        dist.destroy_process_group()
    facts = heard.facts
    assert facts.observed.calls == 1
    assert len(facts.network.linears) == 4
    assert facts.workload.batch_size == 8


def test_an_optimizer_of_deepspeed_that_steps_copies(observer: ScriptObserver, heard: Heard) -> None:
    model = Net()
    optimizer = ZeroOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    for _ in range(WARMUP + STEPS):
        model(torch.randn(8, 16)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    facts = heard.facts
    assert len(facts.network.linears) == 4
    assert (facts.observed.calls, facts.observed.share_pct) == (1, 100)
    assert facts.workload.batch_source == "given"
    assert facts.training.optimizer == f"{ZeroOptimizer.__module__}.ZeroOptimizer"
    assert facts.training.optimizer_stepped
    assert facts.training.parameters_outside_optimizer == 0


def test_a_job_under_accelerate(observer: ScriptObserver, heard: Heard, forget_accelerate: None) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = Net()
    rows = DataLoader(Slow(), batch_size=2)
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=0.01), rows
    )
    for batch, _ in zip(loader, range(2 * (WARMUP + STEPS)), strict=False):
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).pow(2).mean())
            optimizer.step()
            optimizer.zero_grad()
    facts = heard.facts
    assert (facts.observed.calls, facts.workload.accumulate) == (2, 2)
    assert facts.observed.data_ms is not None
    assert facts.training.accelerate is not None
    assert facts.training.accelerate.prepared
    assert facts.training.parameters_outside_optimizer == 0
