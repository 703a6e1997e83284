"""The sampler on real layers: its numbers, compiled code, and nothing left behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

from fp8doctor.health.record import OPERANDS, CastHealth
from fp8doctor.running.layer_sampler import IN_A_COMPILED_FUNCTION, LayerSampler, run_alone
from fp8doctor.stacks.casts import Casts
from fp8doctor.stacks.torch_private import COMPILED_CALL
from tests.running.loops import Block, Net
from tests.running.sampled import Training, float8
from tests.stand_ins import nanochat
from tests.stand_ins.scaled_mm import needs_scaled_mm

pytestmark = pytest.mark.slow

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


def flushed_pct(scaled: torch.Tensor, kind: str) -> float:
    """Cast a scaled tensor, and count what became zero, in percent."""
    zero = scaled.to(getattr(torch, kind)).float() == 0
    return 100 * float((zero & (scaled != 0)).sum() / (scaled != 0).sum())


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_the_shares_are_those_of_the_layers_own_casts(recipe: str) -> None:
    model = float8(recipe, model=nn.Sequential(nn.Linear(64, 32)))
    x, gradient = torch.randn(48, 64), torch.randn(48, 32)
    x *= torch.logspace(0, -9, 64)
    gradient *= torch.logspace(0, -12, 32)
    x.requires_grad_()
    with Casts() as casts:
        run_alone(model[0], (x,), {}, gradient)  # type: ignore[index]
    own = [flushed_pct(*each) for each in casts.seen]
    found = sampled(model, x, gradient)["0"]
    shares = {name: cast.flushed_pct for name, cast in found.items() if cast is not None}
    assert all(any(share == pytest.approx(each, rel=1e-3) for each in own) for share in shares.values())
    assert shares["input"] > 10 < shares["gradient"]
    assert shares["weight"] < 1


def test_a_sound_layer_has_the_ratios_of_its_types() -> None:
    for casts in sampled(float8(), torch.randn(64, 16), torch.randn(64, 16)).values():
        assert [round(cast.sqnr_db) for cast in casts.values()] == pytest.approx([32, 32, 26], abs=2.5)
        assert {cast.non_finite for cast in casts.values()} == {0}


def test_compiled_blocks_keep_their_code_and_are_sampled() -> None:
    model, twin = float8(), float8()
    x = torch.randn(1, 16)
    for block in model.blocks:  # type: ignore[union-attr]
        block.compile(backend="aot_eager")
    plain = sampled(twin, x)
    model(x).sum().backward()
    before = dict(counters["frames"])
    state = torch.get_rng_state()
    assert sampled(model, x) == plain
    assert sampled(model, x) == plain
    model(x).sum().backward()
    assert dict(counters["frames"]) == before
    assert torch.equal(torch.get_rng_state(), state)
    assert COMPILED_CALL not in vars(Block)
    assert not any(module._forward_hooks for module in model.modules())


def test_compiled_blocks_under_a_wrapper_of_torch_distributed() -> None:
    model = float8()
    for at, block in enumerate(model.blocks):  # type: ignore[arg-type,union-attr]
        model.blocks[at] = checkpoint_wrapper(block)  # type: ignore[union-attr,operator]
        model.blocks[at].compile(backend="aot_eager")  # type: ignore[union-attr,index]
    x = torch.randn(1, 16)
    model(x).sum().backward()
    assert sampled(model, x) == sampled(float8(), x)


@pytest.mark.parametrize(("shape", "few"), [((64, 16), 16), ((4, 32, 16), 1), ((4, 8, 16), 2)])
def test_a_batch_under_one_compiled_graph_is_sampled_by_a_few_rows(shape: tuple[int, ...], few: int) -> None:
    """The FP8 matmuls of a GPU take multiples of 16 rows."""
    model, twin = float8(), float8()
    compiled: Any = torch.compile(model, backend="aot_eager")
    x = torch.randn(shape)
    compiled(x).sum().backward()
    assert sampled(compiled, x) == sampled(twin, x[:few])


def test_a_compiled_function_is_left_alone() -> None:
    model = float8()
    sampler = LayerSampler(model, compiled_function=True)
    assert {layer.unseen for layer in sampler.layers} == {IN_A_COMPILED_FUNCTION}
    sampler.begin()
    casts = sampler.end()
    assert all(layer[0] is None and layer[1] is not None and layer[2] is None for layer in casts)


class Checkpointed(Net):
    reentrant = False

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


class Reentrant(Checkpointed):
    reentrant = True


@pytest.mark.parametrize("kind", [Checkpointed, Reentrant])
def test_checkpointed_layers_are_sampled(kind: type[Net]) -> None:
    x = torch.randn(8, 16, requires_grad=True)
    torch.manual_seed(0)
    assert sampled(float8(model=kind(2)), x) == sampled(float8(blocks=2), x)


@needs_scaled_mm
def test_a_layer_of_the_users_own_is_watched_while_it_casts() -> None:
    torch.manual_seed(0)
    layer = nanochat.Float8Linear(32, 64, bias=False).bfloat16()
    x = torch.randn(16, 32, dtype=torch.bfloat16, requires_grad=True)
    found = sampled(nn.Sequential(layer), x, torch.randn(16, 64).bfloat16())["0"]
    assert [round(cast.sqnr_db) for cast in found.values()] == pytest.approx([32, 32, 26], abs=2.5)
    assert [cast.used for cast in found.values()] == pytest.approx([1, 1, 1], rel=1e-3)
    assert found["weight"].amax == pytest.approx(float(layer.weight.detach().abs().max()), rel=1e-3)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_sampled_training_has_the_same_weights_and_random_numbers(compiled: bool, tmp_path: Path) -> None:
    ends = []
    for path in (None, tmp_path / "health"):
        torch.manual_seed(0)
        model = float8(model=nn.Sequential(Net(2), nn.Dropout(0.1)))
        if compiled:
            model[0].compile(backend="aot_eager")  # type: ignore[index]
        training = Training(model, path, every=3)
        loss = training.run(12)
        ends.append((loss, torch.rand(1), *(each.detach().clone() for each in model.parameters())))
    assert all(map(torch.equal, *ends))
    assert len(training.judged()[0].samples) == 4
