"""MOD013 on Linears that torchao's own ``quantize_`` wrapped, with a bias and without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from torch import nn
from torch.nn import functional
from torchao.float8 import convert_to_float8_training
from torchao.quantization import quantize_

from fp8doctor import inspect_model
from fp8doctor.checks.engagement.bias_dropped import bias_dropped
from fp8doctor.facts import Facts, Package, Unrecorded
from fp8doctor.finding import Finding, NotApplicable
from fp8doctor.stacks import torchao as stack
from tests import prototypes

Look = Callable[..., Facts]

EMULATED = "MXFP8_EMULATED_RCEIL"


class Net(nn.Module):
    """As Qwen2: a bias in one projection, none in the other, and a head that stays in 16 bits."""

    def __init__(self, biases: tuple[bool, bool] = (True, False)) -> None:
        super().__init__()
        self.up, self.down = (nn.Linear(64, 64, bias=each) for each in biases)
        self.head = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(torch.relu(self.down(torch.relu(self.up(x)))))


def built(*biases: bool) -> nn.Module:
    torch.manual_seed(0)
    return Net(biases or (True, False)).bfloat16()


def is_body(module: nn.Module, name: str) -> bool:
    return isinstance(module, nn.Linear) and name != "head"


def mxfp8(model: nn.Module, recipe: str = EMULATED) -> nn.Module:
    quantize_(model, prototypes.mxfp8(recipe), filter_fn=is_body)
    return model


def drops_the_bias() -> bool:
    """What the installed torchao does, seen from outside."""
    layer = nn.Linear(64, 64, dtype=torch.bfloat16)
    nn.init.constant_(layer.bias, 100.0)
    quantize_(layer, prototypes.mxfp8(EMULATED))
    return bool(layer(torch.zeros(32, 64, dtype=torch.bfloat16) + 1e-3).float().mean() < 50)


def found(facts: Facts) -> Finding:
    finding = bias_dropped(facts)
    assert isinstance(finding, Finding)
    return finding


@pytest.mark.slow
def test_the_dropped_bias_is_an_error_that_decides_the_verdict() -> None:
    if not drops_the_bias():
        pytest.skip("this torchao adds the bias")
    report = inspect_model(mxfp8(built()), trial=False)
    (finding,) = (each for each in report.findings if each.code == "MOD013")
    assert finding.severity == "error"
    assert finding.evidence["layers"] == 1
    assert finding.evidence["first"] == "up"
    assert report.verdict.status == "layers_do_not_learn"


def test_without_a_bias_it_is_healthy(look: Look) -> None:
    assert bias_dropped(look(mxfp8(built(False, False)))) is None


def test_float8_of_the_same_wrapper_adds_it(look: Look) -> None:
    model = built()
    quantize_(model, prototypes.float8(float8_linear_recipe="tensorwise"), filter_fn=is_body)
    assert bias_dropped(look(model)) is None


def test_float8_linears_are_not_asked(look: Look) -> None:
    assert isinstance(bias_dropped(look(convert_to_float8_training(built()))), NotApplicable)


def test_a_wrapper_that_adds_the_bias_is_healthy_whatever_its_version(
    look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a later torchao may do it."""
    model = mxfp8(built())
    kind = type(model.up.weight.data)
    dropping = kind.__torch_function__.__func__

    def adding(cls: type, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = dropping(cls, func, types, args, kwargs)
        if func.__name__ != "linear":
            return out
        bias = args[2] if len(args) > 2 else kwargs.get("bias")
        return out if bias is None else out + bias

    monkeypatch.setattr(stack, "ADDS_BIAS", {})
    monkeypatch.setattr(kind, "__torch_function__", classmethod(adding))
    assert bias_dropped(look(model)) is None


def test_a_newer_version_that_cannot_be_tried_is_unknown(look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*arguments: Any, **settings: Any) -> Any:
        raise RuntimeError("no kernel")

    model = mxfp8(built())
    monkeypatch.setattr(stack, "ADDS_BIAS", {})
    monkeypatch.setattr(functional, "linear", refuses)
    facts = look(model)
    packages = {**facts.software.packages, "torchao": Package(version="0.18.0", imported=True)}
    software = msgspec.structs.replace(facts.software, packages=packages)
    assert found(msgspec.structs.replace(facts, software=software)), "0.18 was seen to drop it"
    packages["torchao"] = Package(version="0.19.0", imported=True)
    software = msgspec.structs.replace(facts.software, packages=packages)
    with pytest.raises(Unrecorded):
        bias_dropped(msgspec.structs.replace(facts, software=software))


def test_a_forward_of_the_users_own_may_add_it(look: Look) -> None:
    class Adds(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return functional.linear(x, self.weight) + self.bias

    model = built()
    model.up = Adds(64, 64, dtype=torch.bfloat16)
    with pytest.raises(Unrecorded):
        bias_dropped(look(mxfp8(model)))


def test_looking_at_it_leaves_no_trace(look: Look) -> None:
    model = mxfp8(built())
    stack.ADDS_BIAS.clear()
    state = torch.random.get_rng_state()
    look(model)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(each.grad is None for each in model.parameters())


@pytest.mark.parametrize("biases", [(True, True), (True, False)])
def test_the_printed_lines_keep_every_bias_and_it_learns(look: Look, biases: tuple[bool, bool]) -> None:
    finding = found(look(mxfp8(built(*biases), "MXFP8_RCEIL")))
    assert finding.treatment is not None
    assert finding.treatment.kind == "python"
    model = built(*biases)
    nn.init.constant_(model.up.bias, 100.0)
    batch = torch.randn(32, 64, dtype=torch.bfloat16)
    before = model.up(batch).float().mean()
    # The real kernel needs a GPU; the lines are the same with the emulated one.
    exec(finding.treatment.code.replace("MXFP8_RCEIL", EMULATED), {"model": model, "torch": torch})
    assert abs(model.up(batch).float().mean() - before) < 1
    assert type(model.head) is nn.Linear
    assert bias_dropped(look(model)) is None or isinstance(bias_dropped(look(model)), NotApplicable)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    losses = []
    for _ in range(3):
        loss = model(batch).float().pow(2).mean()
        loss.backward()
        assert model.up.bias.grad is not None
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


@pytest.mark.slow
def test_no_other_finding_puts_a_bias_under_mxfp8() -> None:
    """MOD005's real kernel, applied to layers with a bias and without."""
    report = inspect_model(mxfp8(built()), trial=False)
    printed = {each.code: each.treatment.code for each in report.findings if each.treatment}
    assert "MOD005" in printed
    for code, lines in printed.items():
        if "MXFP8TrainingOpConfig" in lines:
            assert "layer.bias is None" in lines, code
    steps = [step.treatment.code for step in report.prescription]
    assert len([each for each in steps if "quantize_" in each]) == 1, "one step converts"
