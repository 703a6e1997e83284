"""A batch that the model cannot take is the verdict without a GPU too, and no other model is accused."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional
from torchao.float8 import convert_to_float8_training

from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.examine import examine
from fp8doctor.facts import Target, Workload
from fp8doctor.loading.job import Job
from fp8doctor.report import Report
from fp8doctor.trial import with_forward


def looked_at(model: nn.Module, batch: torch.Tensor, source: str = "given") -> Report:
    job = Job(model, Target(kind="file", name="model.py"), Workload(batch_source=source), batch)  # type: ignore[arg-type]
    return Report.of(diagnose(with_forward(job, examine(job))))


class Asking(nn.Module):
    """Asks for the data, which a fake tensor does not have, or catches what a layer raises."""

    def __init__(self, ask: str = "") -> None:
        super().__init__()
        self.ask, self.layer = ask, nn.Linear(64, 64).bfloat16()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.ask == "item":
            return self.layer(x) * float(x.sum().item())
        if self.ask == "caught":
            try:
                functional.linear(x[:, 1:], self.layer.weight)
            except RuntimeError:
                return self.layer(x)
        return self.layer(x[x.sum(-1) > 0] if self.ask == "mask" else x)


@pytest.mark.parametrize("fp8", [False, True])
def test_a_layer_that_cannot_multiply_the_batch_is_named(fp8: bool) -> None:
    model = convert_to_float8_training(Asking()) if fp8 else Asking()
    report = looked_at(model, torch.ones(16, 63, dtype=torch.bfloat16))
    assert report.verdict.status == "step_raises"
    refused = report.facts.workload.refused
    assert refused.startswith("layer: ")
    assert "[16, 63] X [64, 64]" in refused
    made_up = looked_at(model, torch.ones(16, 63, dtype=torch.bfloat16), source="made up")
    assert made_up.verdict.status != "step_raises"


@pytest.mark.parametrize("ask", ["item", "mask", "caught", ""])
def test_what_only_a_fake_tensor_cannot_do_is_no_fault(ask: str) -> None:
    report = looked_at(Asking(ask), torch.ones(16, 64, dtype=torch.bfloat16))
    assert report.verdict.status != "step_raises"
