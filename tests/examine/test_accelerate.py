"""What Accelerate and a Trainer were told, as facts."""

from __future__ import annotations

from types import MethodType
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import TorchDynamoPlugin
from accelerate.utils.transformer_engine import contextual_fp8_autocast
from transformers import Trainer, TrainingArguments

from fp8doctor.facts import Accelerate, TrainerArguments
from tests.examine.models import Stacked, llama, network, training
from tests.stand_ins import transformer_engine as stand_in


def test_accelerate_in_bf16(forget_accelerate: None) -> None:
    assert training(Stacked()).accelerate is None
    accelerator = Accelerator(mixed_precision="bf16", cpu=True)
    model = Stacked()
    assert training(model).accelerate == Accelerate(
        mixed_precision="bf16",
        distributed="NO",
        prepared=False,
        may_prepare=True,
        te_autocast=False,
    )
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    facts = training(model, optimizer=optimizer)
    assert facts.accelerate.prepared is True
    assert facts.autocast == "bfloat16"
    assert facts.forward_chain == (
        "accelerate.utils.operations.convert_outputs_to_fp32.<locals>.forward",
        "accelerate.utils.operations.ConvertOutputsToFp32",
        "torch.amp.autocast_mode.autocast_decorator.<locals>.decorate_autocast",
    )
    assert (facts.optimizer, facts.parameters_outside_optimizer) == ("torch.optim.adamw.AdamW", 0)


def test_accelerate_in_fp8(forget_accelerate: None) -> None:
    """Accelerate's torchao path: the first and the last Linear are left out, nothing is compiled."""
    accelerator = Accelerator(mixed_precision="fp8", cpu=True)
    model = llama()
    model, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    facts = training(model)
    assert (facts.accelerate.mixed_precision, facts.autocast, facts.compile_marks) == ("fp8", "bfloat16", ())
    linears = network(model).linears
    assert [each.name for each in linears if each.use == "none"] == [
        "model.layers.0.self_attn.q_proj",
        "lm_head",
    ]
    assert linears[1].features["pad_inner_dim"]
    assert linears[1].features["float8_all_gather_weight"]


def test_accelerates_autocast_for_transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accelerate's own wrapper, around a stand-in for the library."""
    stand_in.install(monkeypatch, "fp8")
    monkeypatch.setattr("accelerate.utils.transformer_engine.is_transformer_engine_available", lambda: True)
    model = Stacked()
    model.forward = MethodType(contextual_fp8_autocast(type(model).forward, stand_in.DelayedScaling()), model)
    assert training(model).forward_chain == (
        "accelerate.utils.transformer_engine.contextual_fp8_autocast.<locals>.forward",
    )


@pytest.mark.parametrize("regional", [False, True])
def test_accelerate_that_compiles(forget_accelerate: None, regional: bool) -> None:
    plugin = TorchDynamoPlugin(backend="aot_eager", use_regional_compilation=regional)
    model = Accelerator(cpu=True, dynamo_plugin=plugin).prepare(Stacked())
    facts = training(model)
    assert facts.accelerate.prepared is True
    regions = ["embedding", "blocks.0", "blocks.1", "blocks.2", "norm", "head"] if regional else [""]
    assert [(each.name, each.form, each.backend) for each in facts.compile_marks] == [
        (name, "wrapped", "aot_eager") for name in regions
    ]
    assert network(model).blocks[0].compiled == 3


def test_training_arguments(forget_accelerate: None, tmp_path: Any) -> None:
    arguments = TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, bf16=True, activation_checkpointing=True
    )
    assert training(llama(), trainer=arguments).trainer == TrainerArguments(
        kind="transformers.training_args.TrainingArguments",
        bf16=True,
        fp16=False,
        mixed_precision="bf16",
        checkpointing=True,
    )


def test_trainer(forget_accelerate: None, tmp_path: Any) -> None:
    model = llama()
    optimizer = torch.optim.SGD([model.lm_head.weight])
    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    trainer = Trainer(model=model, args=arguments, optimizers=(optimizer, None))
    facts = training(model, trainer=trainer)
    assert (facts.trainer.bf16, facts.trainer.mixed_precision, facts.trainer.checkpointing) == (
        False,
        "no",
        False,
    )
    assert (facts.optimizer, facts.parameters_outside_optimizer) == ("torch.optim.sgd.SGD", 2 * 9 + 2)
