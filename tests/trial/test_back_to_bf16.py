"""Layers in FP8 go back to BF16 over the same Parameters: those of torchao, and those of Transformer Engine's
stand-in."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torchao.float8 import convert_to_float8_training

from fp8doctor.stacks.tensors import subclass
from fp8doctor.trial.copies.replica import replicate
from fp8doctor.trial.treatments.apply import NotTried
from fp8doctor.trial.treatments.forms import to_bf16
from tests.examine.models import Stacked
from tests.stand_ins import transformer_engine as te
from tests.trial.treated import applied, float8, in_fp8, same_parameters

pytestmark = pytest.mark.slow


def test_a_float8_linear_becomes_a_linear_over_the_same_parameters() -> None:
    plain = nn.Sequential(nn.Linear(32, 48, bias=False), nn.Linear(48, 16)).bfloat16()
    x = torch.randn(16, 32, dtype=torch.bfloat16)
    expected, weight = plain(x), plain[0].weight
    twin = to_bf16(convert_to_float8_training(plain))
    assert [type(layer) for layer in twin] == [nn.Linear, nn.Linear]  # type: ignore[attr-defined]
    assert twin[0].weight is weight  # type: ignore[index]
    assert torch.equal(twin(x), expected)


def test_a_weight_wrapped_for_the_all_gather_is_unwrapped_over_the_same_data() -> None:
    model = float8(nn.Sequential(nn.Linear(32, 32)).bfloat16(), enable_fsdp_float8_all_gather=True)
    twin = to_bf16(replicate(model, share=True)[0])
    assert subclass(model[0].weight) is not None  # type: ignore[index]
    assert subclass(twin[0].weight) is None  # type: ignore[index]
    assert twin[0].weight.data_ptr() == model[0].weight._tensor.data_ptr()  # type: ignore[index]
    twin(torch.randn(16, 32, dtype=torch.bfloat16)).sum().backward()
    assert twin[0].weight.grad is not None  # type: ignore[index]


def test_some_layers_go_back_to_bf16_and_keep_their_compile_marks() -> None:
    model = float8(Stacked())
    model.blocks[0].up.compile(backend="eager")
    kept = applied("keep-in-bf16", model, "blocks.0.up", "blocks.2.down").model
    assert set(in_fp8(model)) - set(in_fp8(kept)) == {"blocks.0.up", "blocks.2.down"}
    assert kept.blocks[0].up._compiled_call_impl is not None  # type: ignore[union-attr, index]
    assert same_parameters(model, kept)
    with pytest.raises(NotTried, match="none of its layers"):
        applied("keep-in-bf16", model, "blocks.7.up")
    with pytest.raises(NotTried, match="names no layers"):
        applied("keep-in-bf16", model)


def test_a_wrapper_of_the_compiler_stays_and_a_layer_in_two_places_stays_one() -> None:
    model = float8(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32), nn.Sequential()))
    model[2].append(model[1])  # type: ignore[index]
    model[0] = torch.compile(model[0], backend="eager")  # type: ignore[index]
    twin: Any = to_bf16(replicate(model, share=True)[0])
    assert in_fp8(twin) == {}
    assert type(twin[0]).__name__ == "OptimizedModule"
    assert twin[1] is twin[2][0]


# Transformer Engine, on its stand-in.


def filled(module: nn.Module) -> nn.Module:
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module


@pytest.mark.parametrize("returns_bias", [False, True])
def test_a_te_linear_becomes_a_linear_over_the_same_parameters(returns_bias: bool) -> None:
    linear = filled(te.Linear(32, 48))
    linear.return_bias = returns_bias  # type: ignore[assignment]
    twin = to_bf16(nn.Sequential(linear))[0]  # type: ignore[index]
    x = torch.randn(4, 32)
    output = twin(x, is_first_microbatch=None)
    without_bias = output[0] if returns_bias else output - linear.bias
    assert isinstance(twin, nn.Linear)
    assert same_parameters(linear, twin)
    assert torch.allclose(without_bias, functional.linear(x, linear.weight), atol=1e-5)  # type: ignore[arg-type]


def test_a_fused_te_layer_keeps_its_kernels_with_fp8_off(monkeypatch: pytest.MonkeyPatch) -> None:
    te.install(monkeypatch, "quantization")
    layer = te.LayerNormLinear(32, 48)
    twin = to_bf16(replicate(nn.Sequential(layer), share=True)[0])[0]  # type: ignore[index]
    with te.autocast(enabled=True):
        layer(torch.ones(4, 32))
        twin(torch.ones(4, 32))
    assert (layer.fp8, twin.fp8) == (True, False)
    assert type(twin) is te.LayerNormLinear
