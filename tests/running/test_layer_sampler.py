"""The sampler on real layers: its numbers, compiled code, nothing left behind, and what is concluded."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from fp8doctor.health.record import OPERANDS, CastHealth, Health, read_health
from fp8doctor.health.verdict import HealthVerdict, conclude
from fp8doctor.running.layer_sampler import COMPILED, NO_SCALES, LayerSampler
from fp8doctor.running.long_watch import LongWatch
from fp8doctor.running.losses import Losses
from fp8doctor.running.script_messages import WatchOptions
from fp8doctor.stacks.torch_private import COMPILED_CALL
from tests.running.loops import Block, Net, float8
from tests.stand_ins import transformer_engine as te

pytestmark = pytest.mark.slow


class Training:
    """Trains a model step by step, to predict what a fixed network does with random rows."""

    def __init__(self, model: nn.Module, path: Path | None, every: int = 5) -> None:
        torch.manual_seed(1)
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        self.wanted = nn.Linear(16, 16).requires_grad_(False)
        self.notes: list[str | None] = []
        self.watch = None
        if path is not None:
            settings = WatchOptions("train.py", 3, 1, False, None, None, health=str(path), every=every)
            losses = Losses()
            losses.begin()
            self.watch = LongWatch(settings, lambda said: self.notes.append(said.note), losses)
            self.watch.know(SimpleNamespace(model=model, compiled=False), self.optimizer)  # type: ignore[arg-type]

    def run(self, steps: int, before: Callable[[int], Any] = lambda step: None) -> torch.Tensor:
        """Train, calling ``before`` with each step's number."""
        loss = torch.zeros(())
        for step in range(1, steps + 1):
            before(step)
            x = torch.randn(32, 16)
            loss = (self.model(x) - self.wanted(x)).pow(2).mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            if self.watch is not None:
                self.watch.stepped(self.optimizer, sample=True)
        return loss.detach()

    def judged(self, path: Path) -> tuple[Health, HealthVerdict]:
        """Read the file back, and judge it."""
        assert self.watch is not None
        self.watch.ended()
        assert self.notes == []
        health = read_health(path)
        assert [sample.notes for _, sample in health.samples if sample.notes] == []
        return health, conclude(health)


Sampled = dict[str, dict[str, CastHealth | None]]


def sampled(model: nn.Module, x: torch.Tensor, gradient: torch.Tensor | None = None) -> Sampled:
    """Sample one step of a model."""
    sampler = LayerSampler(model)
    sampler.begin()
    output = model(x)
    output.backward(torch.ones_like(output) if gradient is None else gradient)
    found = sampler.end()
    assert sampler.notes == {}
    names = [layer.name for layer in sampler.layers]
    return {name: dict(zip(OPERANDS, casts, strict=True)) for name, casts in zip(names, found, strict=True)}


class Casts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps each tensor that is cast to FP8, scaled, with what became of it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and result.dtype.itemsize == 1:
            self.seen.append((args[0], result))
        return result


def flushed_pct(scaled: torch.Tensor, narrow: torch.Tensor) -> float:
    """Count what became zero, in percent."""
    return 100 * float(((narrow.float() == 0) & (scaled != 0)).sum() / (scaled != 0).sum())


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_the_shares_are_those_of_the_layers_own_casts(recipe: str) -> None:
    model = float8(recipe, model=nn.Sequential(nn.Linear(64, 32)))
    x, gradient = torch.randn(48, 64), torch.randn(48, 32)
    x *= torch.logspace(0, -9, 64)
    gradient *= torch.logspace(0, -12, 32)
    x.requires_grad_()
    with Casts() as casts:
        model(x).backward(gradient)
    own = [flushed_pct(*each) for each in casts.seen]
    found = sampled(model, x, gradient)["0"]
    shares = {name: cast.flushed_pct for name, cast in found.items() if cast is not None}
    assert all(any(share == pytest.approx(each, rel=1e-3) for each in own) for share in shares.values())
    assert shares["input"] > 10 < shares["gradient"]
    assert shares["weight"] < 1


@pytest.mark.parametrize("how", ["by block", "whole", "in a function"])
def test_of_compiled_layers_only_the_weights_are_sampled(how: str) -> None:
    """A hook would compile them again, and only the script may run them."""
    model, twin = float8(), float8()
    x = torch.randn(16, 16)
    called: Any = torch.compile(model, backend="aot_eager") if how != "by block" else model
    for block in model.blocks if how == "by block" else ():  # type: ignore[union-attr]
        block.compile(backend="aot_eager")
    called(x).sum().backward()
    frames, state = dict(counters["frames"]), torch.get_rng_state()
    sampler = LayerSampler(model if how == "in a function" else called, compiled_function=how != "whole")
    assert {layer.unseen for layer in sampler.layers} == {COMPILED}
    sampler.begin()
    called(x).sum().backward()
    weights = [{**each, "input": None, "gradient": None} for each in sampled(twin, x).values()]
    assert [dict(zip(OPERANDS, casts, strict=True)) for casts in sampler.end()] == weights
    assert (sampler.notes, dict(counters["frames"])) == ({}, frames)
    assert torch.equal(torch.get_rng_state(), state)
    assert COMPILED_CALL not in vars(Block)


class Checkpointed(Net):
    reentrant = True

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers_are_sampled(reentrant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Checkpointed, "reentrant", reentrant)
    x = torch.randn(8, 16, requires_grad=True)
    torch.manual_seed(0)
    assert sampled(float8(model=Checkpointed(2)), x) == sampled(float8(blocks=2), x)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_sampled_training_has_the_same_weights_and_random_numbers(compiled: bool, tmp_path: Path) -> None:
    ends = []
    for path in (None, tmp_path / "health"):
        torch.manual_seed(0)
        model = float8(model=nn.Sequential(Net(2), nn.Dropout(0.1), nn.Linear(16, 16)))
        if compiled:
            model[0].compile(backend="aot_eager", dynamic=False)  # type: ignore[index]
        training = Training(model, path, every=3)
        loss = training.run(12)
        ends.append((loss, torch.rand(1), *(each.detach().clone() for each in model.parameters())))
    assert all(map(torch.equal, *ends))
    health, _ = training.judged(tmp_path / "health")
    unseen = [each.unseen for each in health.layers.values() if each.unseen]
    assert (len(health.samples), len(unseen)) == (4, 4 if compiled else 0)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_a_healthy_training_is_accused_of_nothing(recipe: str, tmp_path: Path) -> None:
    training = Training(float8(recipe), tmp_path / "health", every=10)
    training.run(100)
    health, verdict = training.judged(tmp_path / "health")
    assert (verdict.status, verdict.conclusions) == ("healthy", ())
    assert health.steps == (2, *range(12, 93, 10))


class Delayed(te.Linear):
    """Stands in for ``te.Linear`` under delayed scaling: real scales and histories, no FP8 kernel."""

    def __init__(self, width: int, length: int = 64) -> None:
        super().__init__(width, width, bias=False)
        nn.init.normal_(self.weight, std=0.1)
        for name, places in (("scaling_fwd", 3), ("scaling_bwd", 2)):
            state = SimpleNamespace(scale=torch.ones(places), amax_history=torch.zeros(length, places))
            self.fp8_meta[name] = state
        self.fp8_meta["num_gemms"] = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.prepare_forward()
        self._note("scaling_fwd", 0, x)
        self._note("scaling_fwd", 1, self.weight)
        out = nn.functional.linear(x, self.weight)
        out.register_hook(lambda gradient: self._note("scaling_bwd", 0, gradient))
        return out

    def _note(self, name: str, place: int, tensor: torch.Tensor) -> None:
        self.fp8_meta[name].amax_history[0, place] = tensor.detach().abs().max()

    def update(self) -> None:
        """Compute scales and roll histories, as the library does at the end of a step."""
        for name, most in (("scaling_fwd", 448.0), ("scaling_bwd", 57344.0)):
            state = self.fp8_meta[name]
            amax = state.amax_history.amax(0)
            state.scale.copy_(torch.where(amax > 0, most / amax, state.scale))
            state.amax_history.copy_(state.amax_history.roll(-1, 0))
            state.amax_history[0] = 0


def test_a_history_that_a_spike_has_poisoned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    te.install(monkeypatch)
    torch.manual_seed(0)
    layer = Delayed(16)
    training = Training(nn.Sequential(Net(1), layer), tmp_path / "health")

    def spike(step: int) -> None:
        if step > 1:
            layer.update()
        if step == 40:  # one batch with a huge element
            layer.fp8_meta["scaling_fwd"].amax_history[0, 0] = 3e7
            handle = layer.register_forward_pre_hook(lambda module, args: (with_outlier(args[0]),))
            layer.register_forward_hook(lambda *each: handle.remove())

    with te.autocast(enabled=True, recipe=te.DelayedScaling()):
        training.run(100, spike)
    verdict = training.judged(tmp_path / "health")[1]
    found = [fault for each in verdict.conclusions for fault in each.faults]
    assert {(fault.kind, fault.layer) for fault in found} == {("poisoned_history", "1")}
    assert {fault.operand for fault in found} >= {"input"}
    assert all(40 < fault.since <= 50 for fault in found)
    assert "Float8CurrentScaling()" in verdict.conclusions[0].code


def with_outlier(x: torch.Tensor) -> torch.Tensor:
    x = x.detach().clone()
    x[0, 0] = 3e7
    return x


def test_experts_of_transformer_engine_are_said_to_be_unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their scales stand in another order."""
    te.install(monkeypatch)
    layer = te.GroupedLinear(2, 16, 16)
    with te.autocast(enabled=True, recipe=te.DelayedScaling()):
        layer(torch.randn(4, 16), [2, 2])
    (found,) = LayerSampler(nn.Sequential(layer)).layers
    assert (found.stack, found.unseen) == ("transformer_engine", NO_SCALES)
