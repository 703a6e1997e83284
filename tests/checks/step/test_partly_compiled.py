"""STP004 on a real step whose blocks are compiled and whose sick layers, outside of them, are
not."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torchao.float8 import convert_to_float8_training

from fp8doctor.checks.step.fp32_matmul import fp32_matmul
from fp8doctor.facts import Facts
from fp8doctor.finding import Finding
from tests.checks.step.conftest import Block, only, relied_upon
from tests.checks.trials import tried

pytestmark = pytest.mark.slow

WIDTH, VOCABULARY = 128, 4096


class Head(nn.Linear):
    """Casts both operands up."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.float() @ self.weight.float().T


class Speech(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frames = nn.Linear(WIDTH, WIDTH, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = Head(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.frames(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def partly_compiled() -> Facts:
    torch.manual_seed(0)
    model = convert_to_float8_training(
        Speech().bfloat16(), module_filter_fn=lambda layer, name: name != "head"
    )
    for block in model.blocks:
        block.compile(backend="aot_eager")
    facts = relied_upon(tried(model, torch.randn(64, WIDTH, dtype=torch.bfloat16), "as_is"))
    assert facts.trial.arms[0].graphs_run == 2
    return facts


def test_the_uncompiled_product_in_fp32_is_blamed(partly_compiled: Facts) -> None:
    finding = fp32_matmul(only(partly_compiled, "gemm_fp8", "gemm_fp32"))
    assert isinstance(finding, Finding)
    assert "The launching modules: model.head (" in finding.explanation
    assert finding.evidence["modules"] == ("head",)
