"""Releases that train incorrectly, by real jobs on a stand-in for Transformer Engine, with releases put into
the facts: one process has one of each."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import nn
from torchao.float8 import convert_to_float8_training

from fp8doctor.analysis.training_bugs import bugs_of, training_bugs
from fp8doctor.facts import Facts
from tests.checks.checkpointing.test_recompute_not_fp8 import with_te_checkpoint
from tests.checks.environment.test_incompatible_versions import with_releases
from tests.checks.rules import found_by
from tests.stand_ins import transformer_engine as stand_in

Look = Callable[..., Facts]


def bugs(facts: Facts) -> tuple[str, ...]:
    return tuple(bug.name for bug, _ in bugs_of(facts))


@pytest.fixture
def te(monkeypatch: pytest.MonkeyPatch) -> Any:
    return stand_in.install(monkeypatch, "fp8")


def engine() -> Any:
    return sys.modules["transformer_engine.pytorch"]


def ran(*layers: nn.Module, recipe: Any = None, **attributes: Any) -> nn.Module:
    """A model of these layers after a forward in FP8; the first has these attributes."""
    model = nn.Sequential(*layers)
    with engine().fp8_autocast(fp8_recipe=recipe or stand_in.DelayedScaling()):
        model(torch.zeros(16, 64))
    vars(model[0]).update(attributes)
    return model


def linear() -> nn.Module:
    layer: nn.Module = engine().Linear(64, 64)
    return layer


def hybrid(format: str = "HYBRID") -> Any:
    recipe = stand_in.MXFP8BlockScaling()
    vars(recipe).update(fp8_format=SimpleNamespace(name=format))
    return recipe


@pytest.mark.parametrize("disabled", [True, False])
@pytest.mark.parametrize(
    ("gpu", "release"), [("RTX5090", "2.15.0"), ("RTX5090", "2.19.0"), ("B200", "2.15.0")]
)
def test_stochastic_rounding_on_12_x(te: Any, look: Look, gpu: str, release: str, disabled: bool) -> None:
    recipe = stand_in.NVFP4BlockScaling(disable_stochastic_rounding=disabled)
    facts = with_releases(look(ran(linear(), recipe=recipe)), transformer_engine=release)
    found = bugs(replace(facts, assumed_gpu=gpu, gpus=()))
    told = (gpu, release, disabled) == ("RTX5090", "2.15.0", False)
    assert ("stochastic rounding makes gradients zero" in found) is told


class Operation(stand_in.OperationGroupedLinear):
    """After a forward, as ``BasicOperation`` keeps it (1.9 to 2.20)."""

    def __init__(self, recipe: Any = None, trains: bool = True) -> None:
        super().__init__(1, 64, 64)
        kept = {"recipe": recipe or stand_in.DelayedScaling()}
        self._fp8_metas: dict[str, Any] = {"forward": kept, "backward": None}
        self.requires_grad_(trains)


Operation.__name__ = Operation.__qualname__ = "GroupedLinear"
Operation.__module__ = stand_in.OperationGroupedLinear.__module__


def grouped() -> nn.Module:
    experts = engine().GroupedLinear(2, 64, 64)
    with engine().fp8_autocast(fp8_recipe=stand_in.DelayedScaling()):
        experts(torch.zeros(32, 64), [16, 16])
    return nn.Sequential(experts)


def megatron(**settings: Any) -> nn.Module:
    """Megatron's layers, with these settings of its configuration."""
    return ran(linear(), recipe=stand_in.Float8CurrentScaling(), config=SimpleNamespace(**settings))


class LayerWiseDistributedOptimizer(torch.optim.SGD):
    """Megatron's class of this name."""


LayerWiseDistributedOptimizer.__module__ = "megatron.core.optimizer.layer_wise_optimizer"
SELECTIVE = {"fp8": "hybrid", "recompute_granularity": "selective", "fp8_dot_product_attention": True}
QUANTIZED = {"quant_recipe": object(), "fp8": None}
IN_FP8 = {"primary_weights_in_fp8": True}

JOBS: dict[str, tuple[Callable[[], Any], dict[str, str], dict[str, str]]] = {
    "checkpointing stops the update of gradient scales": (
        lambda: ran(with_te_checkpoint(linear()), linear()),
        {"transformer_engine": "1.11.0+4df8488"},
        {"transformer_engine": "1.12.0"},
    ),
    "checkpointing undoes the update of forward scales": (
        lambda: ran(with_te_checkpoint(linear())),
        {"transformer_engine": "2.3.0"},
        {"transformer_engine": "2.4.0"},
    ),
    "the recompute runs in BF16": (
        lambda: ran(with_te_checkpoint(linear())),
        {"transformer_engine": "0.2.0"},
        {"transformer_engine": "0.3.0"},
    ),
    "a frozen first layer stops the update of gradient scales": (
        lambda: nn.Sequential(Operation(trains=False), Operation()),
        {"transformer_engine": "2.6.0"},
        {"transformer_engine": "2.7.0"},
    ),
    "sequence parallelism changes weight gradients": (
        lambda: ran(linear(), tp_size=2, sequence_parallel=True),
        {"transformer_engine": "1.1"},
        {"transformer_engine": "1.2"},
    ),
    "grouped FP8 matmuls read other scales": (
        grouped,
        {"transformer_engine": "1.10.0"},
        {"transformer_engine": "1.11.0"},
    ),
    "FP8 weights are cached and never refreshed": (
        lambda: megatron(**QUANTIZED),
        {"transformer_engine": "2.8", "megatron": "0.18.0"},
        {"transformer_engine": "2.8", "megatron": "0.19.0"},
    ),
    "gathered MXFP8 parameters become NaN": (
        lambda: ran(linear(), recipe=stand_in.MXFP8BlockScaling(), **IN_FP8),
        {"transformer_engine": "2.9", "megatron": "0.15.3"},
        {"transformer_engine": "2.9", "megatron": "0.16.0"},
    ),
    "a forced sync overwrites MXFP8 parameters": (
        lambda: ran(linear(), recipe=stand_in.MXFP8BlockScaling(), **IN_FP8),
        {"transformer_engine": "2.9", "megatron": "0.18.2"},
        {"transformer_engine": "2.9", "megatron": "0.19.0"},
    ),
    "weights kept in FP4 miss their updates": (
        lambda: ran(linear(), recipe=stand_in.NVFP4BlockScaling(), **IN_FP8),
        {"transformer_engine": "2.8", "megatron": "0.17.1"},
        {"transformer_engine": "2.8", "megatron": "0.18.0"},
    ),
    "updates of the layer-wise optimizer do not reach FP8 weights": (
        lambda: ran(linear(), recipe=stand_in.Float8BlockScaling(), **IN_FP8),
        {"transformer_engine": "2.8", "megatron": "0.18.2"},
        {"transformer_engine": "2.8", "megatron": "0.19.0"},
    ),
    "compiled FP8 casts may write NaN": (
        lambda: convert_to_float8_training(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))),
        {"torchao": "0.17.0", "torch_release": "2.14.0+cu130"},
        {"torchao": "0.17.0", "torch_release": "2.13.0"},
    ),
}
"""Bug -> a real job of it, releases that have it, and releases that have not."""


@pytest.mark.parametrize("bug", JOBS)
def test_a_release_that_trains_incorrectly(bug: str, te: Any, look: Look) -> None:
    build, affected, sound = JOBS[bug]
    model = build()
    if "compiled" in bug:
        model.compile()
    optimizer = LayerWiseDistributedOptimizer(model.parameters()) if "layer-wise" in bug else None
    facts = look(model, optimizer=optimizer)
    sick = with_releases(facts, **affected)
    assert bug in bugs(sick)
    assert bug not in bugs(with_releases(facts, **sound))
    row = next(each for each in training_bugs() if each.name == bug)
    assert found_by("incompatible-versions", sick).severity == ("error" if row.certain else "warning")


@pytest.mark.parametrize(
    ("bug", "build", "release"),
    [
        (
            "recomputing several micro-batches reads empty FP8 weights",
            lambda: ran(with_te_checkpoint(linear())),
            "1.3",
        ),
        ("later micro-batches read the first one's weights with a new scale", lambda: ran(linear()), "1.7"),
    ],
)
def test_gradient_accumulation(
    bug: str, build: Callable[[], nn.Module], release: str, te: Any, look: Look
) -> None:
    once = with_releases(look(build()), transformer_engine=release)
    assert bugs(once) == ()
    assert bugs(replace(once, workload=replace(once.workload, accumulate=4))) == (bug,)


@pytest.mark.parametrize(
    ("format", "fused", "found"),
    [("HYBRID", "1", 2), ("HYBRID", "0", 1), ("E4M3", "1", 0)],
)
def test_the_format_of_mxfp8(
    format: str, fused: str, found: int, te: Any, look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients in E5M2, and what the fused grouped MLP makes of them."""
    monkeypatch.setenv("NVTE_CUTEDSL_FUSED_GROUPED_MLP", fused)
    facts = look(nn.Sequential(Operation(hybrid(format))))
    assert len(bugs(with_releases(facts, transformer_engine="2.18"))) == found


@pytest.mark.parametrize(
    ("modules", "attention", "fires"),
    [("core_attn", True, True), ("core_attn", False, False), ("gdn", False, True), ("moe_act", True, False)],
)
def test_what_megatron_recomputes_outside_of_fp8(
    modules: str, attention: bool, fires: bool, te: Any, look: Look
) -> None:
    settings = SELECTIVE | {"recompute_modules": [modules], "fp8_dot_product_attention": attention}
    facts = with_releases(look(megatron(**settings)), transformer_engine="2.8", megatron="0.19.0")
    assert bugs(facts) == (("Megatron recomputes modules outside of FP8",) if fires else ())


def test_weights_in_fp8_alone_and_torchs_optimizer(te: Any, look: Look) -> None:
    model = ran(linear(), **IN_FP8)

    def found(optimizer: Any) -> tuple[str, ...]:
        return bugs(with_releases(look(model, optimizer=optimizer), transformer_engine="2.20.2"))

    fused = type("FusedAdam", (torch.optim.AdamW,), {"__module__": "transformer_engine.pytorch.optimizers"})
    masters = [nn.Parameter(each.detach().float().clone()) for each in model.parameters()]
    assert found(torch.optim.AdamW(model.parameters())) == (
        "the optimizer rounds weights to FP8 in each step",
    )
    assert found(fused(model.parameters())) == found(None) == found(torch.optim.AdamW(masters)) == ()
