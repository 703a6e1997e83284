"""The tiny GEMM that is tried for a recipe does the user's process no harm."""

from __future__ import annotations

import pytest
import torch

from fp8doctor.examine.fp8_support import try_recipes, try_scaled_mm
from fp8doctor.facts import Linear
from fp8doctor.recipes import of_stack
from tests.stand_ins.scaled_mm import needs_rowwise_scaled_mm, needs_scaled_mm

FLOAT8 = [each.name for each in of_stack("torchao") if each.tried]


@pytest.mark.parametrize(
    "by_row", [pytest.param(False, marks=needs_scaled_mm), pytest.param(True, marks=needs_rowwise_scaled_mm)]
)
def test_nothing_of_the_process_changes(by_row: bool) -> None:
    state, grad = torch.get_rng_state(), torch.is_grad_enabled()
    with torch.device("meta"), torch.autocast("cpu", dtype=torch.bfloat16):
        assert try_scaled_mm(by_row, "cpu") is None
        assert torch.empty(1).device.type == "meta"
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.is_grad_enabled() is grad
    assert torch.get_default_dtype() is torch.float32


def test_cuda_is_not_initialized_for_it() -> None:
    linears = [Linear(stack="torchao", use="training", recipe=recipe, features={}) for recipe in FLOAT8]
    before = torch.cuda.is_initialized()
    assert set(try_recipes(linears)) == (set(FLOAT8) if before else set())
    assert torch.cuda.is_initialized() is before


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_real_gpu() -> None:
    torch.cuda.init()
    linears = [Linear(stack="torchao", use="training", recipe="tensorwise", features={})]
    assert try_recipes(linears) == {"tensorwise": None}
    assert torch.ones(1, device="cuda").item() == 1.0
