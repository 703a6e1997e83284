"""Looking at a model runs nothing of the user's: no parametrization, property, ``__getattr__`` or hook.
Random trees of modules are for research/reliability."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils import parametrizations

from fp8doctor import inspect_model
from fp8doctor.facts import Network
from research.reliability.trees import RAN, Asking, counted, noisy


@pytest.fixture(autouse=True)
def _nothing_ran() -> None:
    RAN.clear()


def looked_at(model: nn.Module, **settings: Any) -> Network:
    return inspect_model(model, trial=False, **settings).facts.network


def sizes(network: Network) -> list[tuple[str, int, int]]:
    return [(each.name, each.in_features, each.out_features) for each in network.linears]


PARAMETRIZED: dict[str, Callable[[], nn.Module]] = {
    "spectral_norm": lambda: parametrizations.spectral_norm(nn.Linear(8, 16)),
    "noisy": noisy,
    "noisy bias": lambda: noisy("bias"),
    "the old spectral_norm": lambda: nn.utils.spectral_norm(nn.Linear(8, 16)),
}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("item", PARAMETRIZED)
def test_a_parametrized_linear_is_counted_and_its_parametrization_not_run(item: str) -> None:
    model = nn.Sequential(PARAMETRIZED[item]())
    buffers = {name: each.clone() for name, each in model.named_buffers()}
    drawn = torch.get_rng_state()
    network = looked_at(model)
    assert sizes(network) == [("0", 8, 16)]
    assert network.linears[0].bias
    assert network.linears[0].requires_grad
    assert RAN == []
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(torch.equal(each, buffers[name]) for name, each in model.named_buffers())


READ = """
    num_embeddings in_channels kernel_size in_features config main_input_name _orig_mod weight bias training
    forward hidden_size is_transposed image_size _parameters __class__ __dict__
"""
"""What somebody who looks at a model would read."""


class Forwarding:
    """A user's callable whose attributes are made when they are asked for."""

    def __call__(self, *arguments: Any) -> Any:
        return arguments

    def __getattr__(self, name: str) -> Any:
        RAN.append(name)
        raise AttributeError(name)


class Intercepting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("__"):
            RAN.append(name)
        return super().__getattribute__(name)


def test_no_property_nor_getattr_nor_getattribute_runs() -> None:
    kinds = [type("Counting", (nn.Module,), {name: counted(name)}) for name in READ.split()]
    nowhere = type("Nowhere", (nn.Linear,), {"__module__": None})
    model = nn.Sequential(Asking(8, 8), Intercepting(), nowhere(8, 8), *(kind() for kind in kinds))
    model.forward = Forwarding()
    RAN.clear()
    network = looked_at(model, training_step=Forwarding(), loss=Forwarding())
    assert RAN == []
    assert sizes(network) == [("0", 8, 8), ("1.inner", 8, 8), ("2", 8, 8)]


def test_a_weight_that_a_property_makes_is_a_gap() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    layer = nn.Linear(8, 8)
    layer.raw = layer._parameters.pop("weight")
    layer.__class__ = type("Computed", (nn.Linear,), {"weight": counted("weight")})
    model.append(layer)
    facts = inspect_model(model, trial=False).facts
    assert sizes(facts.network) == [("0", 8, 8), ("1", 8, 8)]
    assert (
        facts.gaps["network.linears"]
        == "Computed keeps no weight that can be looked at without running its code"
    )
    assert RAN == []


class MissingMandatoryValue(Exception):
    pass


class Settings:
    """As OmegaConf's configurations: a value that is still missing raises when it is asked for."""

    def __init__(self) -> None:
        self.vocab_size = 100

    def __getattr__(self, name: str) -> Any:
        RAN.append(name)
        raise MissingMandatoryValue(name)


def test_a_configuration_that_raises() -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    model.config = Settings()
    network = looked_at(model)
    assert (network.vocabulary, network.hidden_size) == (100, None)
    assert RAN == []


def test_an_active_fake_tensor_mode() -> None:
    model = nn.Sequential(nn.Embedding(100, 8), nn.Linear(8, 8))
    expected = looked_at(model)
    with FakeTensorMode():
        assert looked_at(model) == expected


@pytest.mark.slow
@pytest.mark.parametrize("fake", [False, True])
def test_a_trial_below_an_active_fake_tensor_mode(fake: bool) -> None:
    model, batch = nn.Linear(8, 8), torch.ones(4, 8)
    with FakeTensorMode():
        if fake:
            model, batch = nn.Linear(8, 8), torch.ones(4, 8)
        trial = inspect_model(model, batch, device="cpu", budget_s=0.1).facts.trial
    assert ("the model has no weights" in (trial.reason or "")) == fake
    assert (len(trial.arms) > 0) != fake


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", ["script", "trace"])
def test_torchscript_is_walked_and_named(how: str) -> None:
    inner = nn.Sequential(nn.Linear(16, 16), nn.ReLU())
    compiled = torch.jit.script(inner) if how == "script" else torch.jit.trace(inner, torch.ones(2, 16))
    facts = inspect_model(nn.Sequential(nn.Linear(16, 16), compiled), trial=False).facts
    assert sizes(facts.network) == [("0", 16, 16)]
    assert facts.network.parameters == 544
    assert inspect_model(compiled, trial=False).verdict.status == "open"
    assert "TorchScript" in facts.gaps["network.linears"]
