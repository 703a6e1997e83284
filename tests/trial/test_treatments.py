"""What is done to a replica, on real layers and on Transformer Engine's stand-in."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torchao.float8 import convert_to_float8_training
from torchao.quantization import Float8WeightOnlyConfig, quantize_

from fp8doctor.trial.treatments import NotTried, strip_compile_marks, to_bf16, to_float8
from tests.stand_ins import transformer_engine as te


@pytest.mark.parametrize("bias", [True, False])
def test_a_float8_linear_becomes_a_linear_over_the_same_parameters(bias: bool) -> None:
    plain = nn.Sequential(nn.Linear(32, 48, bias=bias), nn.Linear(48, 16)).bfloat16()
    x = torch.randn(16, 32, dtype=torch.bfloat16)
    expected, weight = plain(x), plain[0].weight
    twin = to_bf16(convert_to_float8_training(plain))
    assert [type(layer) for layer in twin] == [nn.Linear, nn.Linear]  # type: ignore[attr-defined]
    assert twin[0].weight is weight  # type: ignore[index]
    assert torch.equal(twin(x), expected)


def test_a_te_linear_becomes_a_linear_and_a_fused_layer_is_refused() -> None:
    linear = te.Linear(32, 48)
    twin = to_bf16(nn.Sequential(linear))
    assert type(twin[0]) is nn.Linear  # type: ignore[index]
    assert twin[0].weight is linear.weight  # type: ignore[index]
    for fused in (te.LayerNormLinear(32, 48), te.LayerNormMLP(32, 64)):
        with pytest.raises(NotTried, match="there is no BF16 form of LayerNorm"):
            to_bf16(nn.Sequential(fused))


def test_stored_weights_have_no_bf16_form() -> None:
    model = nn.Sequential(nn.Linear(32, 32))
    quantize_(model, Float8WeightOnlyConfig())
    with pytest.raises(NotTried, match="stored in low precision"):
        to_bf16(model)


def test_conversion_leaves_out_what_is_named_and_what_is_not_aligned() -> None:
    model = nn.ModuleDict({"a": nn.Linear(32, 32), "odd": nn.Linear(30, 32), "head": nn.Linear(32, 64)})
    converted = to_float8(model, "rowwise", skip=("head",))
    assert {name: type(layer).__name__ for name, layer in converted.items()} == {"a": "Float8Linear", "odd": "Linear", "head": "Linear"}  # type: ignore[operator]
    with pytest.raises(NotTried, match=r"no nn\.Linear that torchao could convert"):
        to_float8(nn.Sequential(nn.Conv1d(16, 16, 1)), "tensorwise")


class Decorated(nn.Module):
    @torch.compile(backend="eager")
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


def test_every_compile_mark_is_taken_off() -> None:
    model = nn.Sequential(nn.Linear(4, 4), torch.compile(nn.Linear(4, 4), backend="eager"), nn.Linear(4, 4), Decorated())
    model[0].compile(backend="eager")
    model[2].forward = torch.compile(model[2].forward, backend="eager")
    stripped = strip_compile_marks(torch.compile(model, backend="eager"))
    torch._dynamo.utils.counters.clear()
    stripped(torch.ones(2, 4))
    assert not torch._dynamo.utils.counters["frames"]
    assert [type(layer).__name__ for layer in stripped] == ["Linear", "Linear", "Linear", "Decorated"]  # type: ignore[attr-defined]
