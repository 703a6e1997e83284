"""FP8 layers that users wrote: nanochat's, DeepSeek-V3's, modded-nanogpt's, and what only sounds like one.

The first three are shortened stand-ins with the calls of their source: repository, commit, path and line
stand in their docstrings, nanochat's commit in tests/recipes/README.md.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fp8doctor import inspect_model
from fp8doctor.facts import Linear
from fp8doctor.stacks import NoCounterpart, bf16_counterpart
from tests.examine.models import network
from tests.recipes.in_torchao import Float8Linear

kernel = ModuleType("kernel")


def act_quant(x: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    raise NotImplementedError(block_size)


kernel.act_quant = act_quant  # type: ignore[attr-defined]
kernel.fp8_gemm = act_quant  # type: ignore[attr-defined]


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """What a weight of one byte is multiplied by where ``gemm_impl`` is fp8.

    deepseek-ai/DeepSeek-V3, 9b4e9788e4a3a731f7567338ed15d3ec549ce03b, inference/model.py:131.
    """
    if weight.element_size() > 1:
        return functional.linear(x, weight)
    x, scale = kernel.act_quant(x, 128)
    return kernel.fp8_gemm(x, scale, weight)  # type: ignore[attr-defined]


class DeepSeekLinear(nn.Module):
    """Its Linear, which derives from no nn.Linear (line 166 there); the scales are left out."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(torch.empty(out_features, in_features, device="meta"))

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight)


class CastedLinear(nn.Linear):
    """The operator is called by its name in torch.ops; its scales are left out.

    KellerJordan/modded-nanogpt, e7a55f17e08556c2ec6d1fbc4e16a54621893089, train_gpt.py:916. The next
    commit has another class in its place, whose weight lies the other way.
    """

    def __init__(self, in_features: int, out_features: int, use_fp8: bool) -> None:
        super().__init__(in_features, out_features, bias=False, device="meta")
        self.use_fp8 = use_fp8

    def forward(self, x: Tensor) -> Tensor:
        if self.use_fp8 and self.training:
            out: Tensor = torch.ops.nanogpt.mm(x.flatten(0, -2), self.weight)[0]
            return out
        return functional.linear(x, self.weight.type_as(x))


@torch.library.custom_op("fp8doctor_strangers::mm", mutates_args=())
def mm_op(x: Tensor, weight: Tensor) -> Tensor:
    one = torch.ones((), device=x.device)
    return torch._scaled_mm(x.to(torch.float8_e4m3fn), weight.t(), one, one, out_dtype=torch.bfloat16)


class OverOperator(nn.Linear):
    """A forward that calls an operator of its own, which torch keeps in an object."""

    def forward(self, x: Tensor) -> Tensor:
        return mm_op(x, self.weight.to(torch.float8_e4m3fn))


class PaddedLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        x = functional.pad(x, (0, -x.shape[-1] % 16))
        return torch._scaled_mm(x, self.weight.t(), x, x)


class NoLinear(DeepSeekLinear):
    forward = PaddedLinear.forward  # type: ignore[assignment]


class FP8Linear(nn.Linear):
    """A class that says so, and whose code calls what cannot be looked into."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.somebody.multiply(x, self.weight)  # type: ignore[no-any-return]


class Ordinary(nn.Linear):
    """Nothing of FP8 but a setting that is not its own."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight)


def only(module: nn.Module) -> Linear:
    (found,) = network(nn.Sequential(module)).linears
    return found


@pytest.mark.parametrize(
    ("module", "use", "gemm"),
    [
        (lambda: Float8Linear(64, 32, bias=False), "training", "torch._scaled_mm"),
        (lambda: OverOperator(64, 32), "training", "torch._scaled_mm"),
        (lambda: DeepSeekLinear(64, 32), "unknown", "fp8_gemm"),
        (lambda: CastedLinear(64, 32, True), "unknown", None),
        (lambda: FP8Linear(64, 32), "unknown", None),
    ],
    ids=["nanochat", "operator", "deepseek", "modded-nanogpt", "by name"],
)
def test_layers_that_users_wrote(module: Any, use: str, gemm: str | None) -> None:
    found = only(module())
    assert (found.stack, found.use, found.features["gemm"]) == ("own", use, gemm)
    assert (found.in_features, found.out_features, found.recipe) == (64, 32, None)


@pytest.mark.parametrize("module", [lambda: CastedLinear(64, 32, False), lambda: Ordinary(64, 32)])
def test_layers_without_fp8_stay_ordinary(module: Any) -> None:
    found = only(module())
    assert (found.stack, found.use) == ("torch", "none")


class HoldsScales(nn.Linear):
    """What it calls fp8 are numbers, and no switch."""

    def __init__(self) -> None:
        super().__init__(64, 64, device="meta")
        self.fp8 = torch.ones(2)

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight * self.fp8.sum())


def test_what_is_no_switch_is_not_asked_whether_it_is_on() -> None:
    assert [each.use for each in network(nn.Sequential(HoldsScales())).linears] == ["none"]


def test_weights_that_are_float8_are_stored() -> None:
    layer = DeepSeekLinear(64, 32)
    layer.weight = nn.Parameter(torch.empty(32, 64, dtype=torch.float8_e4m3fn), requires_grad=False)
    assert not network(nn.Sequential(layer)).linears or only(layer).use == "storage"


def test_a_forward_of_the_layer_alone_counts() -> None:
    layer = nn.Linear(64, 32)
    layer.forward = Float8Linear.forward.__get__(layer)  # type: ignore[method-assign]
    assert only(layer).use == "training"


def test_the_twin_multiplies_the_same_weights_in_bf16() -> None:
    layer = Float8Linear(64, 32, bias=False)
    twin: Any = bf16_counterpart(layer, compiled=False)
    assert twin.weight is layer.weight
    x = torch.randn(4, 64)
    assert torch.equal(twin(x), functional.linear(x.bfloat16(), layer.weight.bfloat16()))
    with pytest.raises(NoCounterpart, match="NoLinear is a class of the user's own"):
        bf16_counterpart(NoLinear(64, 32), compiled=False)


def told(module: nn.Module) -> Any:
    return inspect_model(nn.Sequential(module, nn.Linear(32, 32)), torch.zeros(48, 64), trial=False)


def test_the_verdict_never_denies_fp8() -> None:
    by_code, by_name = told(Float8Linear(64, 32, bias=False)), told(FP8Linear(64, 32))
    assert (by_code.verdict.status, by_code.answer.has_fp8) == ("open", True)
    assert (by_name.verdict.status, by_name.answer.has_fp8) == ("open", False)
    assert by_name.answer.state


def test_a_master_weight_in_fp32_is_not_computed_in_fp32() -> None:
    """nanochat's layer casts both of its operands."""
    layer = Float8Linear(64, 32, bias=False)
    report = inspect_model(nn.Sequential(layer), torch.zeros(48, 64), trial=False)
    assert "STP004" not in [each.code for each in report.findings]


@pytest.mark.slow
def test_sides_are_held_to_torch_s_gemm_alone() -> None:
    def sides(module: nn.Module) -> list[str]:
        report = inspect_model(nn.Sequential(module), torch.zeros(40, 24), trial=False)
        return [each.code for each in report.findings if each.code == "SHP001"]

    assert sides(Float8Linear(24, 32, bias=False)) == ["SHP001"]
    assert sides(PaddedLinear(24, 32)) == []
    assert sides(DeepSeekLinear(24, 32)) == []


class WithoutBackward(nn.Module):
    """Its forward calls the GEMM itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(32, 16, device="meta"))

    def forward(self, x: Tensor) -> Tensor:
        one = torch.ones((), device=x.device)
        weight = self.weight.to(torch.float8_e4m3fn).t()
        return torch._scaled_mm(x.to(torch.float8_e4m3fn), weight, one, one, out_dtype=torch.bfloat16)


class WithoutGradient(WithoutBackward):
    """The same for inference."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return super().forward(x) + torch._scaled_mm(x, self.weight.t(), x, x)


@pytest.mark.parametrize(
    ("layer", "backward"),
    [(WithoutBackward(), False), (WithoutGradient(), None), (WithoutBackward().requires_grad_(False), None)],
    ids=["met by autograd", "no gradient", "frozen"],
)
def test_an_fp8_gemm_that_autograd_meets(layer: nn.Module, backward: bool | None) -> None:
    (linear,) = network(nn.Sequential(layer)).linears
    assert (linear.use, linear.features.get("backward")) == ("training", backward)


def test_autograd_really_meets_it() -> None:
    out = WithoutBackward().to_empty(device="cpu").bfloat16()(torch.ones(16, 16, dtype=torch.bfloat16))
    with pytest.raises(RuntimeError, match="_scaled_mm is not implemented"):
        out.sum().backward()


def test_a_backward_of_its_own_and_an_operator_are_none_of_it() -> None:
    for layer in (Float8Linear(16, 32, device="meta"), CastedLinear(16, 32, use_fp8=True)):
        assert all("backward" not in each.features for each in network(nn.Sequential(layer)).linears)


def test_a_layer_that_says_what_it_quantizes_to() -> None:
    """The attributes of quanto 0.2.7 (``optimum/quanto/nn/qmodule.py``), before ``freeze``."""

    class QLinear(nn.Linear):
        weight_qtype = type("qtype", (), {"name": "qfloat8_e4m3fn"})()

        def forward(self, input: Tensor) -> Tensor:
            return functional.linear(input, self.weight)

    (linear,) = network(nn.Sequential(QLinear(16, 32))).linears
    assert linear.use == "unknown"


def flash_attn_fp8_func(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Stands in for FP8 attention, which needs a GPU."""
    return functional.scaled_dot_product_attention(q, k, v)


def fp8_matmul(x: Tensor, weight: Tensor) -> Tensor:
    one = torch.ones(())
    narrow = (x.to(torch.float8_e4m3fn), weight.to(torch.float8_e4m3fn).t())
    return torch._scaled_mm(*narrow, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96)

    def forward(self, x: Tensor) -> Tensor:
        return flash_attn_fp8_func(*self.qkv(x).chunk(3, dim=-1))


class Held(nn.Module):
    """Is given its matmul; its weights are in a list, so it is no layer."""

    def __init__(self, matmul: Any = fp8_matmul, use_fp8: bool = True) -> None:
        super().__init__()
        self.matmul, self.use_fp8 = matmul, use_fp8
        self.weights = nn.ParameterList([nn.Parameter(torch.ones(32, 32, dtype=torch.bfloat16))])

    def forward(self, x: Tensor) -> Tensor:
        return self.matmul(x, self.weights[0]) if self.use_fp8 else x


@pytest.mark.parametrize(
    ("module", "calls"),
    [
        (Attention(), ("flash_attn_fp8_func in Attention",)),
        (Held(), ("torch._scaled_mm in Held",)),
        (nn.Sequential(Held(), Held()), ("torch._scaled_mm in Held",)),
        (Held(torch.mm), ()),
        (Held(use_fp8=False), ()),
        (nn.Sequential(nn.Linear(32, 32)), ()),
    ],
    ids=["attention", "held function", "once a class", "another function", "switched off", "plain"],
)
def test_fp8_outside_of_layers(module: nn.Module, calls: tuple[str, ...]) -> None:
    assert network(module).fp8_calls == calls


def test_torchaos_fp8_attention() -> None:
    """What ``apply_low_precision_attention`` makes on a GPU, and axolotl's ``attn_implementation: fp8``."""
    wrapper = pytest.importorskip("torchao.prototype.attention.shared_utils.wrapper")
    model = wrapper._FP8FlashAttentionMonkeyPatchWrapper(nn.Linear(32, 32), "FA3", flash_attn_fp8_func)
    name = "_FP8FlashAttentionMonkeyPatchWrapper"
    assert network(model).fp8_calls == (f"{name} in {name}",)


def test_layers_are_not_told_twice() -> None:
    assert network(DeepSeekLinear(32, 32)).fp8_calls == ()


@pytest.mark.parametrize("module", [Attention(), Held()], ids=["attention", "held function"])
def test_what_calls_fp8_is_never_said_to_use_none(module: nn.Module) -> None:
    report = inspect_model(module, torch.zeros(48, 32), trial=False)
    assert report.verdict.status == "open"
    assert "FP8 is outside of layers" in report.verdict.summary
    assert "no FP8" not in report.verdict.summary


def test_fp8_outside_of_layers_has_no_bf16_to_be_timed_against() -> None:
    report = inspect_model(Attention(), torch.zeros(48, 32), device="cpu", budget_s=30)
    assert [(each.name, each.tried) for each in report.facts.arms()] == [("as_is", True)]
    assert report.verdict.status == "open"
    assert report.verdict.bf16_step_ms is None
