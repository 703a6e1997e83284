"""What Accelerate and a Trainer were told, as facts."""

from types import MethodType
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import TorchDynamoPlugin
from accelerate.utils.transformer_engine import contextual_fp8_autocast
from transformers import Trainer, TrainingArguments

from tests.examine.models import Stacked, llama, network, training
from tests.stand_ins import transformer_engine as stand_in


def test_accelerate_in_bf16(forget_accelerate: None) -> None:
    assert training(Stacked()).accelerate is None
    accelerator = Accelerator(mixed_precision="bf16", cpu=True)
    model = Stacked()
    found = training(model).accelerate
    assert (found.mixed_precision, found.distributed) == ("bf16", "NO")
    assert (found.prepared, found.may_prepare) == (False, True)
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


def test_a_trainer_and_its_arguments(forget_accelerate: None, tmp_path: Any) -> None:
    plain: dict[str, Any] = {"output_dir": str(tmp_path), "use_cpu": True, "report_to": []}
    arguments = TrainingArguments(**plain, bf16=True, activation_checkpointing=True)
    found = training(llama(), trainer=Trainer(model=llama(), args=arguments)).trainer
    assert found.kind == "transformers.training_args.TrainingArguments"
    assert (found.bf16, found.fp16, found.mixed_precision, found.checkpointing) == (True, False, "bf16", True)
    model = llama()
    optimizer = torch.optim.SGD([model.lm_head.weight])
    trainer = Trainer(model=model, args=TrainingArguments(**plain), optimizers=(optimizer, None))
    facts = training(model, trainer=trainer)
    found = facts.trainer
    assert (found.bf16, found.mixed_precision, found.checkpointing) == (False, "no", False)
    assert (facts.optimizer, facts.parameters_outside_optimizer) == ("torch.optim.sgd.SGD", 2 * 9 + 2)
