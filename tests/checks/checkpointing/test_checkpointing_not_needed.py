"""CKP001 on real models; a CPU has no peak, so memory and times are those of a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torchao.float8 import convert_to_float8_training
from transformers import TrainingArguments

from fp8doctor import load_report
from fp8doctor.checks.checkpointing.checkpointing_not_needed import checkpointing_not_needed
from fp8doctor.facts import Facts, Gpu
from fp8doctor.finding import Finding, NotApplicable
from tests.checks.arms import ran, timed
from tests.checks.trials import tried
from tests.examine.models import Stacked, llama

pytestmark = pytest.mark.slow

RECORDED = Path(__file__).parents[2] / "patients" / "recorded"
Look = Callable[..., Facts]
H100 = Gpu(name="NVIDIA H100", memory_gib=79.6, memory_used_gib=0.4, visible=True, other_processes=0)


def checkpointed_llama() -> nn.Module:
    model = llama(use_cache=True).train()
    model.gradient_checkpointing_enable()
    return model


def wrapped_blocks() -> nn.Module:
    model = convert_to_float8_training(Stacked().bfloat16())
    model.blocks = nn.ModuleList(checkpoint_wrapper(block) for block in model.blocks)
    return model


def on_gpu(
    facts: Facts, *, without_ms: float = 88.3, peak_gib: float | None = 17.2, gpu: Gpu = H100
) -> Facts:
    arms = (
        ran("as_is", 105.4, peak_gib=7.4),
        ran("checkpointing-off", without_ms, base="as_is", peak_gib=peak_gib),
    )
    return timed(msgspec.structs.replace(facts, gpus=(gpu,)), *arms)


def test_a_step_that_fits_without_it(look: Look) -> None:
    finding = checkpointing_not_needed(on_gpu(look(checkpointed_llama())))
    assert isinstance(finding, Finding)
    assert finding.title == "Activation checkpointing is on, and the step fits without it"
    assert finding.evidence["free_gib"] == 79.6
    assert finding.treatment is not None
    assert finding.treatment.name == "checkpointing-off"


def test_a_step_that_is_known_not_to_fit_without_it_needs_it() -> None:
    recorded_on_gpu = load_report(RECORDED / "h200-checkpointed_of_need.json.gz").facts
    assert checkpointing_not_needed(recorded_on_gpu) is None


def test_the_printed_treatment_makes_it_silent(look: Look) -> None:
    """It also keeps off the KV cache, which checkpointing had kept off."""
    model = checkpointed_llama()
    finding = checkpointing_not_needed(on_gpu(look(model)))
    assert isinstance(finding, Finding)
    assert finding.treatment is not None
    exec(finding.treatment.code, {"model": model})
    after = look(model)
    assert isinstance(checkpointing_not_needed(on_gpu(after)), NotApplicable)
    assert after.training.use_cache is False


@pytest.mark.parametrize(
    "changes",
    [
        {"peak_gib": 72.0},
        {"without_ms": 104.0},
        {"gpu": msgspec.structs.replace(H100, memory_used_gib=65.0, other_processes=1)},
        {"gpu": msgspec.structs.replace(H100, memory_gib=15.9)},
    ],
    ids=["too tight", "costs nothing", "others use the GPU", "a small GPU"],
)
def test_checkpointing_that_is_needed_or_free(changes: dict[str, Any], look: Look) -> None:
    assert checkpointing_not_needed(on_gpu(look(checkpointed_llama()), **changes)) is None


def test_rounds_that_scatter_decide_nothing(look: Look) -> None:
    facts = on_gpu(look(checkpointed_llama()))
    as_is, off = facts.trial.arms
    scattered = msgspec.structs.replace(off, rounds_ms=(60.0, 70.0, 80.0, 110.0, 120.0, 130.0))
    assert checkpointing_not_needed(timed(facts, as_is, scattered)) is None


def test_what_is_not_measured_is_not_called_unneeded(look: Look) -> None:
    facts = look(checkpointed_llama())
    assert isinstance(checkpointing_not_needed(on_gpu(facts, peak_gib=None)), NotApplicable)
    assert isinstance(checkpointing_not_needed(timed(facts, ran("as_is", peak_gib=7.4))), NotApplicable)
    assert isinstance(checkpointing_not_needed(on_gpu(look(llama().train()))), NotApplicable)
    assert isinstance(checkpointing_not_needed(on_gpu(look(checkpointed_llama().eval()))), NotApplicable)


@pytest.mark.slow
def test_a_real_trial_has_the_arm() -> None:
    facts = tried(wrapped_blocks(), torch.zeros(2, 8, dtype=torch.long), "as_is", "checkpointing-off")
    as_is, off = (
        next(arm for arm in facts.trial.arms if arm.name == name) for name in ("as_is", "checkpointing-off")
    )
    assert (off.tried, off.base, off.reason) == (True, "as_is", None)
    peaks = [
        msgspec.structs.replace(arm, peak_gib=1.0, rounds_ms=rounds)
        for arm, rounds in ((as_is, (105.4,) * 6), (off, (88.3,) * 6))
    ]
    finding = checkpointing_not_needed(timed(msgspec.structs.replace(facts, gpus=(H100,)), *peaks))
    assert isinstance(finding, Finding)


def test_the_lines_follow_the_form(forget_accelerate: None, look: Look, tmp_path: Any) -> None:
    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, gradient_checkpointing=True)
    for facts, lines in (
        (look(checkpointed_llama()), "model.gradient_checkpointing_disable()\n"),
        (
            look(checkpointed_llama(), trainer=arguments),
            "TrainingArguments(..., gradient_checkpointing=False)\n",
        ),
        (look(wrapped_blocks()), "# leave out apply_activation_checkpointing()"),
    ):
        finding = checkpointing_not_needed(on_gpu(facts))
        assert isinstance(finding, Finding)
        assert finding.treatment is not None
        assert lines in finding.treatment.code
