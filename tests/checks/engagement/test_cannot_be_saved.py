"""MOD010 on models that Accelerate, a Trainer, PEFT and torchao's prototypes made, and on what really becomes
of their checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.prototype.moe_training.config import Float8TrainingOpConfig
from torchao.quantization import quantize_
from torchao.quantization.quantize_.workflows import Float8Tensor

from fp8doctor import inspect_model
from fp8doctor.checks.engagement.cannot_be_saved import cannot_be_saved
from fp8doctor.examine import saving
from fp8doctor.examine.saving import examine_saving
from fp8doctor.examine.walk import walk
from fp8doctor.facts import Facts
from fp8doctor.facts.unrecorded import NOT_RECORDED
from fp8doctor.finding import Finding, NotApplicable
from tests.examine.models import llama, lora

pytestmark = pytest.mark.slow

Look = Callable[..., Facts]

INVALID = "RuntimeError: Attempted to access the data pointer on an invalid python storage."


def found(facts: Facts) -> Finding:
    finding = cannot_be_saved(facts)
    assert isinstance(finding, Finding)
    return finding


def wrapped(model: nn.Module, all_gather: bool = True) -> nn.Module:
    """As Accelerate's torchao path converts on one device."""
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=all_gather, pad_inner_dim=True)
    return convert_to_float8_training(
        model, config=config, module_filter_fn=lambda module, name: "lora_" not in name and "head" not in name
    )


def trained(folder: Path, save: str) -> Any:
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        str(folder),
        use_cpu=True,
        max_steps=1,
        bf16=False,
        report_to=[],
        save_strategy=save,
        save_steps=1,
        save_only_model=True,
        disable_tqdm=True,
    )
    trainer = Trainer(
        llama(), arguments, train_dataset=[{"input_ids": torch.arange(16), "labels": torch.arange(16)}] * 8
    )
    trainer.train()
    return trainer


def test_a_trainer_stops_at_its_first_checkpoint(
    monkeypatch: pytest.MonkeyPatch, forget_accelerate: None, tmp_path: Path
) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    with pytest.raises(RuntimeError, match="invalid python storage"):
        trained(tmp_path, save="steps")
    report = inspect_model(trained(tmp_path, save="no"), trial=False, ignore="SHP002")
    (finding,) = (each for each in report.findings if each.code == "MOD010")
    assert finding.severity == "error"
    assert (
        finding.title == "13 FP8 layers cannot be saved: their weights are WeightWithDynamicFloat8CastTensor"
    )
    assert finding.explanation.startswith(
        "A Trainer's checkpoint, which uses safetensors, fails on them (tried on "
    )
    assert finding.explanation.endswith(INVALID)
    assert (finding.evidence["torch_save"], finding.evidence["safetensors"]) == (None, INVALID)
    (step,) = (each for each in report.prescription if "MOD010" in each.mends)
    assert set(step.mends) >= {"DST001", "MOD007", "MOD010"}, "one change mends them all"


def test_treatment_by_the_variable_lets_it_save(
    monkeypatch: pytest.MonkeyPatch, forget_accelerate: None, tmp_path: Path
) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    monkeypatch.setenv("ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER", "false")
    report = inspect_model(trained(tmp_path, save="steps"), trial=False)
    assert next(each.outcome for each in report.outcomes if each.code == "MOD010") == "healthy"
    assert list(tmp_path.rglob("model.safetensors"))


def test_a_model_with_save_pretrained(look: Look, tmp_path: Path) -> None:
    model = wrapped(llama())
    finding = found(look(model))
    assert finding.severity is None, "the check's own, an error"
    assert finding.explanation.startswith("save_pretrained, which writes safetensors, fails")
    with pytest.raises(RuntimeError, match="invalid python storage"):
        model.save_pretrained(tmp_path)
    model = wrapped(llama(), all_gather=False)
    assert cannot_be_saved(look(model)) is None
    model.save_pretrained(tmp_path)


def test_wrappers_of_torchaos_prototypes_are_saved_unwrapped(look: Look, tmp_path: Path) -> None:
    model = llama().bfloat16()
    quantize_(
        model,
        Float8TrainingOpConfig(),
        filter_fn=lambda module, name: isinstance(module, nn.Linear) and "head" not in name,
    )
    finding = found(look(model))
    assert (
        finding.evidence["weight_class"]
        == "torchao.prototype.moe_training.tensor.Float8TrainingWeightWrapperTensor"
    )
    assert finding.treatment is not None
    with pytest.raises(RuntimeError, match="invalid python storage"):
        model.save_pretrained(tmp_path)
    exec(finding.treatment.code, {"model": model, "folder": tmp_path})
    again = type(model).from_pretrained(tmp_path)
    assert torch.equal(
        again.model.layers[1].mlp.up_proj.weight, model.model.layers[1].mlp.up_proj.weight._data
    )


def test_what_saves_with_torch_is_not_sick(look: Look) -> None:
    """Nobody knows how a plain module's owner saves it, and ``torch.save`` takes these weights."""
    facts = look(wrapped(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))))
    (weight,) = facts.network.saving
    assert (weight.tried, weight.pickle_error, weight.storage_error) == ("0.weight", None, INVALID)
    assert cannot_be_saved(facts) is None


def test_accelerate_alone_warns(look: Look, forget_accelerate: None, tmp_path: Path) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(mixed_precision="fp8", cpu=True)
    model = accelerator.prepare(nn.Sequential(*(nn.Linear(32, 32) for _ in range(4))))
    finding = found(look(model))
    assert (finding.severity, finding.explanation.startswith("Accelerate's save_state or save_model")) == (
        "warning",
        True,
    )
    for save in (accelerator.save_state, lambda folder: accelerator.save_model(model, folder)):
        with pytest.raises(RuntimeError, match="invalid python storage"):
            save(str(tmp_path))


class Unpicklable(torch.Tensor):
    """A weight of the user's own class that refuses to be saved."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("not this one")


def test_a_weight_that_torch_cannot_save(look: Look) -> None:
    model = convert_to_float8_training(nn.Sequential(nn.Linear(32, 32)))
    model[0].weight = nn.Parameter(torch.ones(32, 32).as_subclass(Unpicklable))
    finding = found(look(model))
    assert finding.explanation == "torch.save fails on them (tried on 0.weight): TypeError: not this one"
    assert finding.treatment is None
    with pytest.raises(TypeError, match="not this one"):
        torch.save(model.state_dict(), "/dev/null")


def test_a_frozen_base_is_not_saved_with_its_adapters(look: Look, tmp_path: Path) -> None:
    model = wrapped(lora(llama()))
    assert cannot_be_saved(look(model)) is None
    model.save_pretrained(tmp_path)


def test_without_fp8_training_there_is_no_question(look: Look) -> None:
    model = nn.Sequential(nn.Linear(32, 32).bfloat16())
    assert look(model).network.saving == ()
    assert isinstance(cannot_be_saved(look(model)), NotApplicable)
    stored = Float8Tensor.from_hp(torch.ones(32, 32, dtype=torch.bfloat16))
    model[0].weight = nn.Parameter(stored, requires_grad=False)
    assert isinstance(cannot_be_saved(look(model)), NotApplicable)


def test_an_ordinary_conversion_is_healthy_without_a_try(look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "save", None)
    assert cannot_be_saved(look(convert_to_float8_training(llama()))) is None


def test_only_the_smallest_is_tried_and_nothing_large(monkeypatch: pytest.MonkeyPatch) -> None:
    model = wrapped(nn.Sequential(nn.Linear(256, 256), nn.Linear(32, 64), nn.Linear(64, 32)))
    gaps: dict[str, str] = {}
    assert [each.tried for each in examine_saving(walk(model), gaps)] == ["1.weight"]
    monkeypatch.setattr(saving, "MOST_BYTES", 32 * 64 * 4 - 1)
    assert examine_saving(walk(model), gaps) is NOT_RECORDED
    assert gaps == {"network.saving": "the smallest WeightWithDynamicFloat8CastTensor is too large to try"}


def test_a_view_of_something_large_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pickling a view writes the whole storage."""
    model = wrapped(nn.Sequential(nn.Linear(32, 32)))
    model[0].weight._tensor = torch.ones(64, 32)[:32]
    monkeypatch.setattr(saving, "MOST_BYTES", 32 * 32 * 4)
    assert examine_saving(walk(model), {}) is NOT_RECORDED


def test_weights_without_data_are_unknown(look: Look) -> None:
    with torch.device("meta"):
        model = wrapped(nn.Sequential(nn.Linear(32, 32)))
    facts = look(model)
    assert (
        facts.gaps["network.saving"]
        == "the smallest WeightWithDynamicFloat8CastTensor has no data (meta device)"
    )
    (outcome,) = (each for each in inspect_model(model, trial=False).outcomes if each.code == "MOD010")
    assert outcome.outcome == "unknown"


def test_trying_changes_nothing() -> None:
    model = wrapped(nn.Sequential(nn.Linear(32, 32)))
    weight, state = model[0].weight, torch.get_rng_state()
    before, version = weight._tensor.detach().clone(), weight._tensor._version
    examine_saving(walk(model), {})
    assert model[0].weight is weight
    assert torch.equal(weight._tensor, before)
    assert (weight._tensor._version, weight.requires_grad) == (version, True)
    assert torch.equal(torch.get_rng_state(), state)
