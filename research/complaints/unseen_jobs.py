"""The jobs of ``unseen.toml``, rebuilt as far as a CPU can."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

from research.complaints.parts import Pair, TeExperts, mlp, rows
from tests.checks.checkpointing.test_recompute_not_fp8 import with_te_checkpoint
from tests.stand_ins import packages
from tests.stand_ins import transformer_engine as te


class Rebuilt(NamedTuple):
    """What fp8doctor is given."""

    model: Any
    batch: Any = None
    optimizer: Any = None


Build = Callable[[pytest.MonkeyPatch], Rebuilt]


def installed(patch: pytest.MonkeyPatch, release: str, flavour: str = "fp8", **others: str) -> ModuleType:
    """Install the stand-in for Transformer Engine, with this release and these of other packages."""
    packages.stand_in(patch, transformer_engine=release, **others)
    if "megatron_core" in others:
        patch.setitem(sys.modules, "megatron", ModuleType("megatron"))
    return te.install(patch, flavour)


def ran(model: nn.Module, width: int, recipe: Any = None) -> nn.Module:
    """The model after a forward in FP8; the stand-in writes down what the real library would."""
    before = te.FP8GlobalStateManager.enabled, te.FP8GlobalStateManager.recipe
    te.FP8GlobalStateManager.enabled = True
    te.FP8GlobalStateManager.recipe = recipe or te.DelayedScaling()
    try:
        model(rows(16, width))
    finally:
        te.FP8GlobalStateManager.enabled, te.FP8GlobalStateManager.recipe = before
    return model


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make().bfloat16()


def decoder(pairs: int = 8) -> nn.Module:
    return on_meta(lambda: mlp(te.Linear, 4096, pairs))


def layers_of(model: nn.Module) -> list[Any]:
    return [each for each in model.modules() if isinstance(each, te.TransformerEngineBaseModule)]


def weights_in_fp8(model: nn.Module) -> nn.Module:
    for layer in layers_of(model):
        layer.primary_weights_in_fp8 = True
    return model


def processes(count: int) -> None:
    """Make this process the first of so many; torch's fake group answers for the others."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)


def te_job(
    patch: pytest.MonkeyPatch, release: str, recipe: Any = None, flavour: str = "fp8", **others: str
) -> Rebuilt:
    installed(patch, release, flavour, **others)
    return Rebuilt(ran(decoder(), 4096, recipe), rows(8192, 4096))


def te_decoder(patch: pytest.MonkeyPatch) -> Rebuilt:
    return te_job(patch, "0.9.0")


def grouped_mxfp8_in_megatron(patch: pytest.MonkeyPatch) -> Rebuilt:
    installed(patch, "2.15.0", "quantization", megatron_core="0.18.0")
    model = on_meta(lambda: nn.Sequential(TeExperts(te.GroupedLinear, 8, 2048, 1024)))
    return Rebuilt(ran(model, 2048, te.MXFP8BlockScaling()), rows(8192, 2048))


def fp4_weights_in_megatron(patch: pytest.MonkeyPatch) -> Rebuilt:
    job = te_job(patch, "2.9.0", te.NVFP4BlockScaling(), "quantization", megatron_core="0.15.0")
    return job._replace(model=weights_in_fp8(job.model))


def mxfp8_weights_in_megatron(patch: pytest.MonkeyPatch) -> Rebuilt:
    job = te_job(patch, "2.13.0", te.MXFP8BlockScaling(), "quantization", megatron_core="0.17.0")
    return job._replace(model=weights_in_fp8(job.model))


class LayerWiseDistributedOptimizer(torch.optim.Optimizer):
    """Megatron's class of this name, which steps whole parameters with Muon."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-3})


LayerWiseDistributedOptimizer.__module__ = "megatron.core.optimizer.layer_wise_optimizer"


def muon_on_fp8_weights(patch: pytest.MonkeyPatch) -> Rebuilt:
    job = mxfp8_weights_in_megatron(patch)
    return job._replace(optimizer=LayerWiseDistributedOptimizer(job.model.parameters()))


def te_compiled(patch: pytest.MonkeyPatch) -> Rebuilt:
    installed(patch, "1.1.0")
    return Rebuilt(torch.compile(ran(decoder(), 4096)), rows(8192, 4096))


def torchao_decoder(patch: pytest.MonkeyPatch) -> Rebuilt:
    model = convert_to_float8_training(on_meta(lambda: mlp(nn.Linear, 4096, 8)))
    return Rebuilt(torch.compile(model), rows(8192, 4096))


class ReplicateComputation(nn.Module):
    """SimpleFSDP's parametrization, which redistributes a weight; here it returns it."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.data * 1


ReplicateComputation.__module__ = "torchtitan.experiments.simple_fsdp.simple_fsdp"


def simple_fsdp(patch: pytest.MonkeyPatch) -> Rebuilt:
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True)
    model = convert_to_float8_training(mlp(nn.Linear, 256, 2).bfloat16(), config=config)
    for layer in (each for each in model.modules() if isinstance(each, nn.Linear)):
        parametrize.register_parametrization(layer, "weight", ReplicateComputation(), unsafe=True)
    return Rebuilt(torch.compile(model), torch.zeros(2048, 256, dtype=torch.bfloat16))


def mxfp8_hybrid(patch: pytest.MonkeyPatch) -> Rebuilt:
    recipe = te.MXFP8BlockScaling()
    vars(recipe).update(fp8_format=SimpleNamespace(name="HYBRID"))
    return te_job(patch, "2.8.0", recipe)


def in_groups(patch: pytest.MonkeyPatch, release: str, group: bool) -> Rebuilt:
    """Delayed scaling on the first of 16 processes."""
    processes(16)
    recipe = te.DelayedScaling()
    vars(recipe).update(reduce_amax=True)
    job = te_job(patch, release, recipe)
    for layer in layers_of(job.model):
        layer.fp8_meta["fp8_group"] = dist.new_group([0, 8]) if group else None
        layer.tp_size = 8
    return job


def amax_of_data_parallel_ranks(patch: pytest.MonkeyPatch) -> Rebuilt:
    return in_groups(patch, "0.10.0", group=True)


def amax_of_all_ranks(patch: pytest.MonkeyPatch) -> Rebuilt:
    return in_groups(patch, "0.11.0", group=False)


def first_te_checkpoint(patch: pytest.MonkeyPatch) -> Rebuilt:
    installed(patch, "0.1.0")
    model = on_meta(lambda: nn.Sequential(*(with_te_checkpoint(Pair(te.Linear, 4096)) for _ in range(4))))
    for layer in layers_of(model):
        layer.fp8_meta["recipe"], layer.forwarded_at_least_once = te.DelayedScaling(), True
    return Rebuilt(model, rows(8192, 4096))


def sequence_parallel(patch: pytest.MonkeyPatch) -> Rebuilt:
    job = te_job(patch, "1.0.0")
    for layer in layers_of(job.model):
        layer.tp_size, layer.sequence_parallel = 8, True
    return job


def weights_cached_for_ever(patch: pytest.MonkeyPatch) -> Rebuilt:
    job = te_job(patch, "2.13.0", te.Float8CurrentScaling(), "quantization", megatron_core="0.17.0")
    for layer in layers_of(job.model):
        layer.is_first_microbatch = False
        layer.config = SimpleNamespace(quant_recipe="recipe.yaml", fp8=None, fp4=None, use_kitchen=False)
    return job


def one_row(patch: pytest.MonkeyPatch) -> Rebuilt:
    installed(patch, "2.1.0")
    model = on_meta(lambda: nn.Sequential(te.Linear(256, 5120), nn.SiLU(), te.Linear(5120, 5120)))
    return Rebuilt(ran(model, 256), rows(1, 256))


def float8_in_ddp(patch: pytest.MonkeyPatch) -> Rebuilt:
    packages.stand_in(patch, torchao="0.6.1")
    processes(8)
    model = convert_to_float8_training(mlp(nn.Linear, 256, 2).bfloat16())
    return Rebuilt(
        torch.compile(DistributedDataParallel(model)), torch.zeros(2048, 256, dtype=torch.bfloat16)
    )


def grouped_delayed(patch: pytest.MonkeyPatch) -> Rebuilt:
    installed(patch, "1.9.0")
    model = on_meta(lambda: nn.Sequential(TeExperts(te.GroupedLinear, 8, 2048, 1024)))
    return Rebuilt(ran(model, 2048), rows(8192, 2048))


def te_layers_in_fp32(patch: pytest.MonkeyPatch) -> Rebuilt:
    installed(patch, "0.8.0")
    with torch.device("meta"):
        model = mlp(te.Linear, 4096, 8)
    model.add_module("norm", nn.LayerNorm(4096, device="meta", dtype=torch.float16))
    return Rebuilt(model, torch.empty(8192, 4096, dtype=torch.float16, device="meta"))


def before_te_1_6(patch: pytest.MonkeyPatch) -> Rebuilt:
    return te_job(patch, "1.6.0.dev0")


class FP8Linear(nn.Linear):
    """MS-AMP's layer of this name, without its scaling tensors."""


FP8Linear.__module__ = "msamp.nn.linear"


def msamp_on_a100(patch: pytest.MonkeyPatch) -> Rebuilt:
    for name in ("msamp", "msamp.nn", "msamp.nn.linear"):
        patch.setitem(sys.modules, name, ModuleType(name))
    return Rebuilt(on_meta(lambda: mlp(FP8Linear, 4096, 4)), rows(8192, 4096))


def te_2_1_beside_torch_2_5(patch: pytest.MonkeyPatch) -> Rebuilt:
    patch.setattr(torch, "__version__", "2.5.1+cu124")
    patch.setattr(torch.version, "cuda", "12.4")
    return te_job(patch, "2.1.0")


def experts_without_tokens(patch: pytest.MonkeyPatch) -> Rebuilt:
    installed(patch, "1.7.0", megatron_core="0.8.0")
    model = on_meta(lambda: nn.Sequential())
    model.add_module("experts", nn.ModuleList(on_meta(lambda: Pair(te.Linear, 1024)) for _ in range(8)))
    model.forward = lambda x: sum(
        expert(part) for expert, part in zip(model.experts, x.chunk(8), strict=True)
    )  # type: ignore[method-assign, misc]
    return Rebuilt(ran(model, 1024), rows(8192, 1024))
