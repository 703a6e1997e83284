"""The check before an expensive run, on what a real Accelerator prepared."""

from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader
from torchao.float8 import convert_to_float8_training

from fp8doctor.integrations import check
from fp8doctor.report import ReportFailed
from tests.markdown import fenced

BATCH = torch.ones(32, 64)


@pytest.mark.slow
def test_it_takes_what_the_accelerator_knows_and_raises(forget_accelerate: None) -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=4)
    model = convert_to_float8_training(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)))
    prepared = accelerator, *accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    before = torch.get_rng_state()
    report = check(*prepared, BATCH)
    assert report is not None
    assert (report.facts.workload.accumulate, report.facts.workload.tokens) == (4, 32)
    assert report.facts.training.autocast == "bfloat16"
    assert report.facts.training.optimizer == "torch.optim.adamw.AdamW"
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(ReportFailed, match="CMP001"):
        check(*prepared, BATCH, fail_on="warning")
    assert check(*prepared, BATCH, fail_on="warning", select="ENV") is not None


def test_the_example_of_the_readme(forget_accelerate: None) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    names: dict[str, Any] = {
        "accelerator": Accelerator(cpu=True),
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters()),
        "loader": DataLoader(BATCH),
        "batch": BATCH,
    }
    exec(compile(fenced("example: accelerate"), "docs/api.md", "exec"), names)
