"""The observer on models and optimizers that a library has wrapped, and on a library's trainer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.render import text
from fp8doctor.running.observer import ScriptObserver
from tests.running.conftest import STEPS, WARMUP, Heard
from tests.running.loops import Net, Slow, train
from tests.stand_ins.deepspeed_optimizer import ZeroOptimizer


@pytest.mark.usefixtures("forget_accelerate")
def test_a_trainer_that_fails_before_its_first_step(
    observer: ScriptObserver, heard: Heard, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As its script ends, what has overridden the launcher is told, and that prepare() had to fail."""
    from transformers import Trainer, TrainingArguments

    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "AO")
    arguments = TrainingArguments(str(tmp_path), bf16=True, use_cpu=True, max_steps=1, report_to=[])
    trainer = Trainer(Net(), arguments, train_dataset=Slow())
    with pytest.raises(AttributeError, match="'config'"):
        trainer.train()
    observer.failed()
    report = diagnose(heard.facts)
    (finding,) = (each for each in report.findings if each.code == "ENV001")
    assert finding.title.endswith("but TrainingArguments(bf16=True) made it bf16")
    assert "prepare() will fail: 'NoneType' object has no attribute 'config'" in finding.explanation
    assert [step.code for step in report.prescription] == ["ENV001"]
    assert "ENV001" in [each.code for each in report.answer.causes]
    assert "unknown, " in text.render(report, verbose=True)


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


@pytest.mark.parametrize("original", [True, False])
def test_a_model_whose_parameters_are_flat(observer: ScriptObserver, heard: Heard, original: bool) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = FullyShardedDataParallel(Net(), use_orig_params=original, device_id=torch.device("cpu"))
        train(model, WARMUP + STEPS)
    finally:
        dist.destroy_process_group()
    facts = heard.facts
    assert len(facts.network.linears) == 4
    assert facts.observed.share_pct == 100
    assert facts.training.parameters_outside_optimizer == 0


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
