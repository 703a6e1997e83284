"""A batch that the model cannot take is the verdict without a GPU too, and no other model is accused."""

from contextlib import nullcontext
from typing import Any

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


def looked_at(model: nn.Module, batch: torch.Tensor, source: str = "given", **more: Any) -> Report:
    job = Job(model, Target(kind="file", name="model.py"), Workload(batch_source=source), batch, **more)  # type: ignore[arg-type]
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


def network(*layers: nn.Module, dtype: torch.dtype) -> nn.Module:
    return nn.Sequential(*layers).to(dtype)


FLOATS, TOKENS = torch.ones(16, 64), torch.ones(16, 64, dtype=torch.long)
IMAGES = torch.ones(2, 3, 32, 32)

IN_BF16 = {
    "a Linear": network(nn.Linear(64, 64), dtype=torch.bfloat16),
    "an embedding": network(nn.Embedding(64, 64), nn.Linear(64, 64), dtype=torch.bfloat16),
    "a convolution": network(nn.Conv2d(3, 64, 32), nn.Flatten(), nn.Linear(64, 64), dtype=torch.bfloat16),
}


@pytest.mark.parametrize(
    ("name", "batch", "autocast", "layer"),
    [
        ("a Linear", FLOATS, None, "0"),
        ("a Linear", TOKENS, torch.bfloat16, "0"),
        ("an embedding", FLOATS, torch.bfloat16, "0"),
        ("a convolution", IMAGES, None, "0"),
        ("a Linear", FLOATS, torch.bfloat16, ""),
        ("a Linear", FLOATS.bfloat16(), None, ""),
        ("an embedding", TOKENS, None, ""),
        ("an embedding", TOKENS.int(), torch.bfloat16, ""),
        ("a convolution", IMAGES, torch.bfloat16, ""),
        ("a convolution", IMAGES.bfloat16(), None, ""),
    ],
)
def test_a_dtype_that_a_layer_does_not_take_is_the_verdict(
    name: str, batch: torch.Tensor, autocast: torch.dtype | None, layer: str
) -> None:
    """As a real step on this CPU raises, or does not."""
    report = looked_at(IN_BF16[name], batch, autocast=autocast)
    assert report.facts.get("workload.refused", "").partition(":")[0] == layer
    assert (report.verdict.status == "step_raises") is bool(layer)
    raises = pytest.raises(RuntimeError) if layer else nullcontext()
    with raises, torch.autocast("cpu", torch.bfloat16, enabled=autocast is not None):
        IN_BF16[name](batch)


def test_what_casts_its_input_first_is_no_fault() -> None:
    """A hook of the user, which a copy does not have, FP8 layers, which cast themselves, and the step."""
    hooked = network(nn.Linear(64, 64), dtype=torch.bfloat16)
    hooked.register_forward_pre_hook(lambda module, args: (args[0].bfloat16(),))
    fp8 = convert_to_float8_training(network(nn.Linear(64, 64), dtype=torch.bfloat16))
    for model in (hooked, fp8):
        assert looked_at(model, FLOATS).verdict.status != "step_raises"

    def step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(batch.bfloat16()).sum()
        return loss

    assert looked_at(IN_BF16["a Linear"], FLOATS, training_step=step).verdict.status != "step_raises"


@pytest.mark.parametrize("ask", ["item", "mask", "caught", ""])
def test_what_only_a_fake_tensor_cannot_do_is_no_fault(ask: str) -> None:
    report = looked_at(Asking(ask), torch.ones(16, 64, dtype=torch.bfloat16))
    assert report.verdict.status != "step_raises"
