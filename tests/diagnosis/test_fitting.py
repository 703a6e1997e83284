"""A job that does not fit gets what makes it fit first, and the lines do what they say."""

import copy
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import nn
from torchao.float8 import convert_to_float8_training
from transformers import LlamaConfig, LlamaForCausalLM

from fp8doctor import Report, inspect_model
from fp8doctor.analysis.memory import USABLE, fit
from fp8doctor.analysis.treatment_table import after, traits
from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.diagnosis.fitting import to_fit
from fp8doctor.facts import NOT_RECORDED, recorded
from tests import replays


def llama(layers: int, width: int = 4096, *, trained: bool = True) -> nn.Module:
    with torch.device("meta"):
        model = LlamaForCausalLM(
            LlamaConfig(hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers)
        ).bfloat16()
    for name, parameter in model.named_parameters():
        parameter.requires_grad = trained or name.endswith("norm.weight")
    return model


def stored(model: nn.Module) -> nn.Module:
    """The model with its Linears in FP8, as a LoRA's base is stored."""
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            layer.weight = nn.Parameter(layer.weight.to(torch.float8_e4m3fn), requires_grad=False)
    return model


def looked_at(model: nn.Module, samples: int, gpu: str) -> Report:
    tokens = torch.zeros(samples, 2048, dtype=torch.long, device="meta")
    return inspect_model(
        model, {"input_ids": tokens, "labels": tokens}, trial=False, assume_gpu=gpu, progress=False
    )


@pytest.mark.parametrize(
    ("model", "samples", "gpu", "changes"),
    [
        (lambda: llama(4), 128, "h100", ["smaller-batch"]),
        (lambda: llama(24), 1, "h100", []),
        (lambda: llama(72, trained=False), 1, "l4", ["checkpointing-on", "base-in-4-bits"]),
        (lambda: stored(llama(104, trained=False)), 1, "l4", ["checkpointing-on", "base-in-4-bits"]),
        (lambda: llama(32), 1, "rtx4090", ["optimizer-in-8-bits", "shard"]),
    ],
)
def test_the_changes_that_make_a_job_fit_come_first(
    model: Any, samples: int, gpu: str, changes: list[str]
) -> None:
    report = looked_at(model(), samples, gpu)
    plan = [step.treatment.name for step in report.prescription]
    assert plan[: len(changes)] == changes
    assert (report.verdict.status == "does_not_fit") == bool(changes)
    fitted, found = to_fit(report.facts), fit(report.facts)
    assert [treatment.name for treatment, _ in fitted] == changes
    if fitted and found:
        assert report.prescription[len(fitted) - 1].peak_gib == report.answer.fits_in_gib
        assert fitted[-1][1].gib <= USABLE * found.gpu_gib < found.now.gib


@pytest.mark.parametrize(
    ("folder", "name", "gpu", "plan"),
    [
        ("patients", "h200-decoder_468m", "RTX 4090", ["compile-blocks"]),
        ("patients", "h200-llama_8b_float8", "L40S", ["optimizer-in-8-bits", "shard", "compile-blocks"]),
        ("benchmarks", "h100-gemma_2b_lora", "L40S", ["compile-blocks", "adapters-to-bf16"]),
        ("benchmarks", "h100-phi3_mini_bf16", "RTX 4090", ["optimizer-in-8-bits", "compile-blocks"]),
    ],
)
def test_a_plan_is_fitted_as_the_job_that_it_makes(folder: str, name: str, gpu: str, plan: list[str]) -> None:
    facts = replays.of(folder, name).report.facts
    report = diagnose(replace(facts, trial=NOT_RECORDED, observed=NOT_RECORDED, assumed_gpu=gpu))
    steps = report.prescription
    assert [each.treatment.name for each in steps] == plan
    fixed = after(report.facts, (each.treatment for each in steps))
    peaks = [each.treatment.name for each in steps if recorded(each, "peak_gib")]
    of_memory = [name for name in peaks if not traits(name).then]
    assert [treatment.name for treatment, _ in to_fit(fixed)] == of_memory
    now, then = fit(report.facts), fit(fixed)
    assert now
    assert then
    assert (report.answer.fits_in_gib is not None) == now.may_be_too_large
    if not of_memory:
        assert report.answer.compared.gain


class Blocks(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width, bias=False), nn.GELU(), nn.Linear(width, width, bias=False))
            for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


@pytest.mark.parametrize("compiled", [False, True])
def test_the_lines_checkpoint_blocks_in_fp8_and_change_no_gradient(compiled: bool) -> None:
    with torch.device("meta"):
        large = convert_to_float8_training(Blocks(4096).bfloat16())
    batch = torch.zeros(2**22, 4096, dtype=torch.bfloat16, device="meta")
    report = inspect_model(large, batch, trial=False, assume_gpu="h100", progress=False)
    lines = report.prescription[0].treatment
    assert (lines.name, lines.kind) == ("checkpointing-on", "python")
    torch.manual_seed(0)
    plain = convert_to_float8_training(Blocks(64))
    model, calls = copy.deepcopy(plain), list[object]()
    model.blocks[0][1].register_forward_hook(lambda *_: calls.append(0))
    if compiled:
        for block in model.blocks:
            block.compile(backend="eager")
    exec(lines.code, {"model": model, "torch": torch})
    for each in (plain, model):
        torch.manual_seed(0)
        each(torch.randn(32, 64)).square().mean().backward()
    assert len(calls) == 2
    for (_, expected), (_, found) in zip(plain.named_parameters(), model.named_parameters(), strict=True):
        assert expected.grad is not None
        assert torch.equal(expected.grad, found.grad)
