"""MOD007 on models that Accelerate and PEFT made, and on optimizers that are right or cannot tell."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils import TorchDynamoPlugin
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

from fp8doctor import inspect_model
from fp8doctor.analysis.treatment_table import OPTIMIZER_LAST
from fp8doctor.checks.engagement.parameters_without_optimizer import parameters_without_optimizer
from fp8doctor.examine.fp8_conversion import ConversionWatch
from fp8doctor.facts import Facts, recorded
from fp8doctor.finding import Finding, NotApplicable
from tests.checks.engagement.accelerated import prepare
from tests.examine.models import llama, lora
from tests.stand_ins.deepspeed_optimizer import ZeroOptimizer

Look = Callable[..., Facts]


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD([each for each in parameters if each.requires_grad], lr=0.1)


def found(facts: Facts) -> Finding:
    finding = parameters_without_optimizer(facts)
    assert isinstance(finding, Finding)
    return finding


@pytest.mark.slow
def test_accelerate_unfreezes_a_lora_base(
    look: Look, monkeypatch: pytest.MonkeyPatch, forget_accelerate: None
) -> None:
    model = lora(llama())
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert frozen
    model, optimizer = prepare(monkeypatch, model, sgd(model.parameters()))
    finding = found(look(model, optimizer=optimizer))
    assert finding.severity is None, "the check's own, an error"
    assert finding.evidence["trainable_lora_bases"] == 14
    assert finding.treatment is not None
    assert finding.treatment.name == "freeze-again"
    exec(finding.treatment.code, {"model": model, "optimizer": optimizer})
    assert parameters_without_optimizer(look(model, optimizer=optimizer)) is None
    assert not frozen.intersection(name for name, each in model.named_parameters() if each.requires_grad)


@pytest.mark.gate("DDP")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("around", "plugin"),
    [
        (None, {"backend": "eager"}),
        (None, {"backend": "eager", "use_regional_compilation": True}),
        (nn.DataParallel, None),
        (torch.nn.parallel.DistributedDataParallel, None),
    ],
    ids=["compiled", "compiled by block", "DataParallel", "DDP"],
)
def test_what_was_frozen_is_frozen_again_whatever_prepare_wraps(
    around: Any, plugin: Any, look: Look, monkeypatch: pytest.MonkeyPatch, forget_accelerate: None
) -> None:
    settings = {"dynamo_plugin": TorchDynamoPlugin(**plugin)} if plugin else {}
    model = lora(llama())
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    model, optimizer = prepare(monkeypatch, model, sgd(model.parameters()), **settings)
    if around is torch.nn.parallel.DistributedDataParallel:
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = around(model) if around else model
        finding = found(look(model, optimizer=optimizer))
        assert finding.treatment is not None
        again = "prepare_model" in finding.treatment.code
        assert again is (around is torch.nn.parallel.DistributedDataParallel)
        accelerator = SimpleNamespace(unwrap_model=lambda wrapped: wrapped.module, prepare_model=around)
        names = {"model": model, "optimizer": optimizer, "accelerator": accelerator}
        exec(finding.treatment.code, names)
        model = names["model"]
        assert parameters_without_optimizer(look(model, optimizer=optimizer)) is None
        now = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        assert {name.replace("_orig_mod.", "").removeprefix("module.") for name in now} == trained
        batch = {"input_ids": torch.arange(16).reshape(1, 16), "labels": torch.arange(16).reshape(1, 16)}
        before = {name: each.detach().clone() for name, each in model.named_parameters()}
        losses = []
        for _ in range(3):
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert losses[-1] < losses[0]
        moved = {name for name, each in model.named_parameters() if not torch.equal(each, before[name])}
        assert moved
        assert moved <= now
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def test_a_converted_base_that_was_unfrozen_later(look: Look) -> None:
    base = llama().bfloat16()
    convert_to_float8_training(base, module_filter_fn=lambda module, name: name != "lm_head")
    model = lora(base)
    optimizer = sgd(model.parameters())
    assert parameters_without_optimizer(look(model, optimizer=optimizer)) is None
    model.base_model.model.model.layers[0].mlp.requires_grad_(True)
    finding = found(look(model, optimizer=optimizer))
    assert finding.title == (
        "3 trainable parameter tensors are in no optimizer group, so no step updates them"
    )
    assert finding.evidence["first"][0] == "base_model.model.model.layers.0.mlp.gate_proj.base_layer.weight"


def test_frozen_layers_that_a_watched_conversion_made_trainable(
    look: Look, monkeypatch: pytest.MonkeyPatch, forget_accelerate: None
) -> None:
    """Without LoRA: only who saw the conversion knows that they were frozen."""
    with ConversionWatch() as watch:
        model = nn.Sequential(nn.Linear(32, 32).requires_grad_(False), nn.Linear(32, 32))
        model, optimizer = prepare(monkeypatch, model, sgd(model.parameters()))
    finding = found(look(model, optimizer=optimizer, watched=watch))
    assert finding.explanation.startswith("What was frozen in 1 layer is trainable")
    assert finding.evidence["first"] == ("0.weight", "0.bias")


def accelerated(**settings: Any) -> tuple[nn.Module, Any]:
    """Accelerate's torchao path on one device, as the documentation shows it."""
    from accelerate import Accelerator

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
    model, optimizer = Accelerator(mixed_precision="fp8", cpu=True, **settings).prepare(
        model, sgd(model.parameters())
    )
    return model, optimizer


def learns(model: nn.Module, optimizer: Any) -> bool:
    """Whether one step changes a converted weight."""
    model(torch.ones(32, 32)).pow(2).mean().backward()
    weight = getattr(model[1].weight, "_tensor", model[1].weight)
    before = weight.detach().clone()
    optimizer.step()
    return not torch.equal(weight, before)


def test_accelerate_wraps_the_weights_that_the_optimizer_holds(look: Look, forget_accelerate: None) -> None:
    model, optimizer = accelerated()
    finding = found(look(model, optimizer=optimizer))
    assert (finding.evidence["outside_optimizer"], finding.evidence["wrapped_weights"]) == (2, 2)
    assert finding.treatment is not None
    assert finding.treatment.name == "no-float8-all-gather"
    assert not learns(model, optimizer)


@pytest.mark.slow
def test_a_trainer_does_the_same(
    monkeypatch: pytest.MonkeyPatch, forget_accelerate: None, tmp_path: Path
) -> None:
    from transformers import Trainer, TrainingArguments

    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    arguments = TrainingArguments(
        str(tmp_path),
        use_cpu=True,
        max_steps=1,
        bf16=False,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = Trainer(
        llama(), arguments, train_dataset=[{"input_ids": torch.arange(16), "labels": torch.arange(16)}] * 8
    )
    trainer.train()
    (finding,) = (each for each in inspect_model(trainer, trial=False).findings if each.code == "MOD007")
    assert (finding.severity, finding.evidence["wrapped_weights"]) == ("error", 13)


def test_treatment_without_the_wrapping_makes_it_silent(look: Look, forget_accelerate: None) -> None:
    from accelerate.utils import AORecipeKwargs

    model, optimizer = accelerated(
        kwargs_handlers=[AORecipeKwargs(config=Float8LinearConfig(pad_inner_dim=True))]
    )
    assert parameters_without_optimizer(look(model, optimizer=optimizer)) is None
    assert learns(model, optimizer)


def test_treatment_by_the_variable_makes_it_silent(
    look: Look, forget_accelerate: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER", "false")
    model, optimizer = accelerated()
    assert parameters_without_optimizer(look(model, optimizer=optimizer)) is None


def test_an_optimizer_that_was_built_before_the_layers_were_replaced(look: Look) -> None:
    model = convert_to_float8_training(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)))
    optimizer = sgd(model.parameters())
    assert parameters_without_optimizer(look(model, optimizer=optimizer)) is None
    model[1] = convert_to_float8_training(nn.Linear(32, 32))
    finding = found(look(model, optimizer=optimizer))
    assert finding.evidence["first"] == ("1.weight", "1.bias")
    assert finding.treatment is not None
    assert finding.treatment.name == "optimizer-after-conversion"
    assert parameters_without_optimizer(look(model, optimizer=sgd(model.parameters()))) is None


def test_what_fp8_did_not_cause_stays_in_bf16(look: Look) -> None:
    model = nn.Sequential(convert_to_float8_training(nn.Sequential(nn.Linear(32, 32))), nn.Linear(32, 32))
    finding = found(look(model, optimizer=sgd(model[0].parameters())))
    assert finding.treatment is not None
    assert finding.treatment.name == OPTIMIZER_LAST


def test_without_fp8_it_is_information(look: Look) -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    assert found(look(model, optimizer=sgd(model[1].parameters()))).severity == "info"


def test_no_optimizer_is_not_applicable(look: Look) -> None:
    assert isinstance(parameters_without_optimizer(look(nn.Linear(32, 32))), NotApplicable)


def test_an_optimizer_that_is_a_callable_is_unknown() -> None:
    report = inspect_model(nn.Linear(32, 32), optimizer=lambda parameters: None, trial=False)
    (outcome,) = (each for each in report.outcomes if each.code == "MOD007")
    assert (outcome.outcome, "does not call it" in (outcome.reason or "")) == ("unknown", True)


def test_deepspeed_trains_what_it_writes_back(look: Look) -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    optimizer = ZeroOptimizer(sgd(model.parameters()))
    assert parameters_without_optimizer(look(model, optimizer=optimizer)) is None
    model[1] = convert_to_float8_training(nn.Linear(32, 32))
    assert found(look(model, optimizer=optimizer)).evidence["first"] == ("1.weight", "1.bias")


class Copies:
    """An optimizer that holds copies of the parameters, and nothing else, and is no torch.optim.Optimizer."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.param_groups = [{"params": [each.detach().clone() for each in parameters]}]


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda model: Copies(model.parameters()), "may hold copies"),
        pytest.param(
            lambda model: torch.optim.Muon([model[0].weight]),
            "Muon takes matrices only",
            marks=pytest.mark.skipif(
                not hasattr(torch.optim, "Muon"), reason="torch before 2.9 has no torch.optim.Muon"
            ),
        ),
    ],
    ids=["copies", "Muon"],
)
def test_optimizers_whose_groups_cannot_tell_are_unknown(
    build: Callable[[nn.Module], Any], reason: str, look: Look
) -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32))
    facts = look(model, optimizer=build(model))
    assert not recorded(facts, "training.parameters_outside_optimizer")
    assert reason in facts.gaps["training.parameters_outside_optimizer"]
