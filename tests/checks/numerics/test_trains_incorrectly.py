"""NUM004 on real torchao layers and on the stand-in for Transformer Engine, with the releases put into the
facts: one process has one of each."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from packaging.specifiers import SpecifierSet
from torch import nn
from torchao.float8 import convert_to_float8_training

from fp8doctor.analysis.training_bugs import STRUCTURES, TrainingBug, training_bugs
from fp8doctor.facts import Facts, Package
from tests.checks.checkpointing.test_recompute_not_fp8 import with_te_checkpoint
from tests.checks.environment.live import finding_of, outcome_of
from tests.stand_ins import transformer_engine as stand_in

Look = Callable[..., Facts]


def with_releases(facts: Facts, torch_release: str = "2.13.0", **packages: str) -> Facts:
    found = {name: Package(version=release, imported=True) for name, release in packages.items()}
    software = msgspec.structs.replace(facts.software, torch=torch_release, packages=found)
    return msgspec.structs.replace(facts, software=software)


def bugs(facts: Facts) -> tuple[str, ...]:
    finding = finding_of("NUM004", facts)
    return finding.evidence["bugs"] if finding else ()  # type: ignore[return-value]


@pytest.fixture
def te(monkeypatch: pytest.MonkeyPatch) -> Any:
    return stand_in.install(monkeypatch, "fp8")


def after_a_forward(te: Any, layers: list[nn.Module], recipe: Any = None) -> nn.Module:
    model = nn.Sequential(*layers)
    with te.fp8_autocast(fp8_recipe=recipe or stand_in.DelayedScaling()):
        model(torch.zeros(16, 64))
    return model


@pytest.mark.parametrize(
    ("release", "bug"),
    [
        ("1.5.0", None),
        ("1.11.0+4df8488", "checkpointing stops the update of gradient scales"),
        ("1.12.0", None),
        ("2.0.0", "checkpointing undoes the update of forward scales"),
        ("2.3.0", "checkpointing undoes the update of forward scales"),
        ("2.4.0", None),
        ("not a version", None),
    ],
)
def test_te_checkpoint_over_delayed_scaling(release: str, bug: str | None, te: Any, look: Look) -> None:
    model = after_a_forward(te, [with_te_checkpoint(te.Linear(64, 64)), te.Linear(64, 64)])
    facts = with_releases(look(model), transformer_engine=release)
    finding = finding_of("NUM004", facts)
    assert bugs(facts) == ((bug,) if bug else ())
    if bug:
        assert finding is not None
        assert (finding.severity, finding.breaks) == ("error", "layers_do_not_learn")
        assert finding.title.startswith(f"Transformer Engine {release} trains 1 FP8 layer incorrectly: ")


def test_another_recipe_or_none_yet(te: Any, look: Look) -> None:
    layer = te.Linear(64, 64)
    model = nn.Sequential(with_te_checkpoint(layer))
    unknown = outcome_of("NUM004", with_releases(look(model), transformer_engine="2.3"))
    assert (unknown.outcome, unknown.reason) == ("unknown", "only a forward in FP8 shows the recipe")
    after_a_forward(te, [layer], recipe=stand_in.Float8CurrentScaling())
    assert outcome_of("NUM004", with_releases(look(model), transformer_engine="2.3")).outcome == "healthy"
    without = with_releases(look(nn.Sequential(te.Linear(64, 64))), transformer_engine="2.3")
    assert outcome_of("NUM004", without).outcome == "healthy"


def test_recompute_with_gradient_accumulation_may_go_wrong(te: Any, look: Look) -> None:
    facts = with_releases(
        look(after_a_forward(te, [with_te_checkpoint(te.Linear(64, 64))])), transformer_engine="1.3"
    )
    assert bugs(facts) == ()
    facts = msgspec.structs.replace(facts, workload=msgspec.structs.replace(facts.workload, accumulate=4))
    finding = finding_of("NUM004", facts)
    assert finding is not None
    assert finding.severity == "warning"
    assert "may train 1 FP8 layer incorrectly" in finding.title


class Operation(stand_in.OperationGroupedLinear):
    """After a forward with delayed scaling, as ``BasicOperation`` keeps it (1.9 to 2.20)."""

    def __init__(self) -> None:
        super().__init__(1, 64, 64)
        self._fp8_metas: dict[str, Any] = {"forward": {"recipe": stand_in.DelayedScaling()}, "backward": None}


Operation.__name__ = Operation.__qualname__ = "GroupedLinear"
Operation.__module__ = stand_in.OperationGroupedLinear.__module__


@pytest.mark.parametrize(
    ("frozen", "release", "sick"),
    [(0, "2.6.0", True), (0, "2.7.0", False), (1, "2.6.0", False), (None, "2.6.0", False), (0, "1.8", False)],
)
def test_a_frozen_first_operation(frozen: int | None, release: str, sick: bool, te: Any, look: Look) -> None:
    model = nn.Sequential(Operation(), Operation())
    if frozen is not None:
        model[frozen].requires_grad_(False)
    found = bugs(with_releases(look(model), transformer_engine=release))
    assert found == (("a frozen first layer stops the update of gradient scales",) if sick else ())


@pytest.mark.parametrize(
    ("format", "fused", "release", "sick"),
    [
        ("HYBRID", "1", "2.18", True),
        ("E4M3", "1", "2.18", False),
        ("HYBRID", "0", "2.18", False),
        ("HYBRID", "1", "2.19", True),
        ("HYBRID", "1", "2.20", False),
    ],
)
def test_gradients_of_the_fused_grouped_mlp(
    format: str, fused: str, release: str, sick: bool, te: Any, look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NVTE_CUTEDSL_FUSED_GROUPED_MLP", fused)
    experts, recipe = Operation(), stand_in.MXFP8BlockScaling()
    vars(recipe).update(fp8_format=SimpleNamespace(name=format))
    experts._fp8_metas["forward"]["recipe"] = recipe
    found = bugs(with_releases(look(nn.Sequential(experts)), transformer_engine=release))
    assert ("the fused grouped MLP reads E5M2 gradients as E4M3" in found) == sick


def test_sequence_parallelism_of_old_releases(te: Any, look: Look) -> None:
    model = after_a_forward(te, [te.Linear(64, 64)])
    model[0].tp_size, model[0].sequence_parallel = 2, True
    (bug,) = bugs(with_releases(look(model), transformer_engine="1.1"))
    assert bug.startswith("sequence parallelism")
    assert bugs(with_releases(look(model), transformer_engine="1.2")) == ()


def test_weights_in_fp8_alone_and_torchs_optimizer(te: Any, look: Look) -> None:
    model = after_a_forward(te, [te.Linear(64, 64)])
    model[0].primary_weights_in_fp8 = True  # what quantized_model_init leaves on a module

    def found(optimizer: Any) -> tuple[str, ...]:
        return bugs(with_releases(look(model, optimizer=optimizer), transformer_engine="2.20.2"))

    class FusedAdam(torch.optim.AdamW):
        pass

    FusedAdam.__module__ = "transformer_engine.pytorch.optimizers.fused_adam"
    assert found(torch.optim.AdamW(model.parameters())) == (
        "the optimizer rounds weights to FP8 in each step",
    )
    assert found(FusedAdam(model.parameters())) == found(None) == ()
    masters = [nn.Parameter(each.detach().float().clone()) for each in model.parameters()]
    assert found(torch.optim.AdamW(masters)) == ()
    model.requires_grad_(False)
    assert found(torch.optim.AdamW([nn.Parameter(torch.zeros(1))])) == ()


@pytest.mark.parametrize(("release", "sick"), [("0.15.3", True), ("0.16.0", False)])
def test_megatron_gathers_mxfp8_weights(release: str, sick: bool, te: Any, look: Look) -> None:
    model = after_a_forward(te, [te.Linear(64, 64)], recipe=stand_in.MXFP8BlockScaling())
    model[0].primary_weights_in_fp8 = True
    facts = with_releases(look(model), transformer_engine="2.9", megatron=release)
    assert ("gathered MXFP8 parameters become NaN" in bugs(facts)) == sick


@pytest.mark.parametrize(
    ("torchao", "torch_release", "compiled", "sick"),
    [
        ("0.17.0", "2.14.0+cu130", True, True),
        ("0.17.0", "2.15.1", True, True),
        ("0.18.0", "2.14.0", True, False),
        ("0.17.0", "2.13.0", True, False),
        ("0.17.0", "2.14.0", False, False),
        ("not a version", "2.14.0", True, False),
    ],
)
def test_versions_that_miscompile(
    torchao: str, torch_release: str, compiled: bool, sick: bool, look: Look
) -> None:
    model = convert_to_float8_training(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).bfloat16())
    if compiled:
        model.compile()
    facts = with_releases(look(model), torch_release, torchao=torchao)
    assert bugs(facts) == (("compiled FP8 casts may write NaN",) if sick else ())


def test_without_fp8_there_is_nothing_to_compare(look: Look) -> None:
    assert outcome_of("NUM004", look(nn.Sequential(nn.Linear(64, 64)))).outcome == "not_applicable"


@pytest.mark.parametrize("bug", training_bugs(), ids=lambda bug: bug.name)
def test_each_row_has_a_source_and_a_release_that_is_not_affected(bug: TrainingBug) -> None:
    assert bug.structure in STRUCTURES
    assert bug.sources
    assert all(each.startswith("https://") for each in bug.sources)
    assert bug.effect.endswith(".")
    for fixed in re.findall(r">=([\d.]+)\"", bug.lines):
        assert fixed not in SpecifierSet(bug.versions)


@pytest.mark.parametrize(("release", "bug"), [("0.2.0", "the recompute runs in BF16"), ("0.3.0", None)])
def test_te_checkpoint_of_the_first_releases(release: str, bug: str | None, te: Any, look: Look) -> None:
    model = after_a_forward(te, [with_te_checkpoint(te.Linear(64, 64))])
    assert bugs(with_releases(look(model), transformer_engine=release)) == ((bug,) if bug else ())


@pytest.mark.parametrize(("release", "sick"), [("1.8", False), ("1.10.0", True), ("1.11.0", False)])
def test_grouped_layers_with_delayed_scaling(release: str, sick: bool, te: Any, look: Look) -> None:
    experts = te.GroupedLinear(2, 64, 64)
    with te.fp8_autocast(fp8_recipe=stand_in.DelayedScaling()):
        experts(torch.zeros(32, 64), [16, 16])
    found = bugs(with_releases(look(nn.Sequential(experts)), transformer_engine=release))
    assert found == (("grouped FP8 matmuls read other scales",) if sick else ())


@pytest.mark.parametrize(("format", "sick"), [("HYBRID", True), ("E4M3", False)])
def test_the_format_of_mxfp8(format: str, sick: bool, te: Any, look: Look) -> None:
    recipe = stand_in.MXFP8BlockScaling()
    vars(recipe).update(fp8_format=SimpleNamespace(name=format))
    facts = with_releases(look(after_a_forward(te, [te.Linear(64, 64)], recipe)), transformer_engine="2.8")
    assert bugs(facts) == (("MXFP8 casts gradients to E5M2",) if sick else ())


@pytest.mark.parametrize(
    ("release", "settings", "sick"),
    [
        ("0.18.0", {"quant_recipe": object(), "fp8": None}, True),
        ("0.19.0", {"quant_recipe": object(), "fp8": None}, False),
        ("0.18.0", {"quant_recipe": object(), "fp8": "hybrid"}, False),
        ("0.18.0", {"quant_recipe": None, "fp8": "hybrid"}, False),
    ],
)
def test_megatrons_precision_file(
    release: str, settings: dict[str, Any], sick: bool, te: Any, look: Look
) -> None:
    model = after_a_forward(te, [te.Linear(64, 64)], stand_in.Float8CurrentScaling())
    model[0].config = SimpleNamespace(**settings)
    found = bugs(with_releases(look(model), transformer_engine="2.8", megatron=release))
    assert found == (("FP8 weights are cached and never refreshed",) if sick else ())


@pytest.mark.parametrize(
    ("release", "accumulate", "sick"),
    [("1.5", 4, False), ("1.7", 4, True), ("1.7", 1, False), ("1.8", 4, False)],
)
def test_weights_of_the_first_micro_batch(
    release: str, accumulate: int, sick: bool, te: Any, look: Look
) -> None:
    facts = with_releases(look(after_a_forward(te, [te.Linear(64, 64)])), transformer_engine=release)
    workload = msgspec.structs.replace(facts.workload, accumulate=accumulate)
    found = bugs(msgspec.structs.replace(facts, workload=workload))
    assert found == (("later micro-batches read the first one's weights with a new scale",) if sick else ())


@pytest.mark.parametrize(
    ("settings", "sick"),
    [
        ({"recompute_modules": ["core_attn"], "fp8_dot_product_attention": True}, True),
        ({"recompute_modules": ["core_attn"], "fp8_dot_product_attention": False}, False),
        ({"recompute_modules": ["gdn"], "fp8_dot_product_attention": False}, True),
        ({"recompute_modules": ["moe_act"], "fp8_dot_product_attention": True}, False),
        ({"recompute_modules": ["gdn"], "recompute_granularity": "full"}, False),
    ],
)
def test_what_megatron_recomputes_outside_of_fp8(
    settings: dict[str, Any], sick: bool, te: Any, look: Look
) -> None:
    model = after_a_forward(te, [te.Linear(64, 64)], stand_in.Float8CurrentScaling())
    model[0].config = SimpleNamespace(**({"fp8": "hybrid", "recompute_granularity": "selective"} | settings))
    found = bugs(with_releases(look(model), transformer_engine="2.8", megatron="0.19.0"))
    assert found == (("Megatron recomputes modules outside of FP8",) if sick else ())


class LayerWiseDistributedOptimizer(torch.optim.SGD):
    """Megatron's class of this name."""


LayerWiseDistributedOptimizer.__module__ = "megatron.core.optimizer.layer_wise_optimizer"


@pytest.mark.parametrize(
    ("recipe", "layer_wise", "release", "bug"),
    [
        ("NVFP4BlockScaling", False, "0.17.1", "weights kept in FP4 miss their updates"),
        ("NVFP4BlockScaling", False, "0.18.0", None),
        ("MXFP8BlockScaling", False, "0.18.2", "a forced sync overwrites MXFP8 parameters"),
        ("MXFP8BlockScaling", False, "0.19.0", None),
        (
            "Float8BlockScaling",
            True,
            "0.17.0",
            "updates of the layer-wise optimizer do not reach FP8 weights",
        ),
        ("Float8BlockScaling", True, "0.18.0", None),
        ("Float8BlockScaling", False, "0.17.0", None),
    ],
)
def test_megatrons_weights_in_low_precision(
    recipe: str, layer_wise: bool, release: str, bug: str | None, te: Any, look: Look
) -> None:
    model = after_a_forward(te, [te.Linear(64, 64)], getattr(stand_in, recipe)())
    model[0].primary_weights_in_fp8 = True
    optimizer = LayerWiseDistributedOptimizer(model.parameters()) if layer_wise else None
    facts = with_releases(look(model, optimizer=optimizer), transformer_engine="2.8", megatron=release)
    assert bugs(facts) == ((bug,) if bug else ())
