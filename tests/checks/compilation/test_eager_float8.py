"""CMP001 on real torchao models: every way to compile treats it, and what need not be compiled is left
alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torchao.float8 import convert_to_float8_training
from transformers import LlamaConfig, LlamaForCausalLM

from fp8doctor.analysis.compile_coverage import WHY_WRAPPED
from fp8doctor.checks.compilation.compile_without_effect import compile_without_effect
from fp8doctor.checks.compilation.eager_float8 import eager_float8
from fp8doctor.checks.compilation.only_linears_compiled import only_linears_compiled
from fp8doctor.facts import Facts
from fp8doctor.finding import Finding, NotApplicable
from fp8doctor.report import load_report
from tests.test_recorded import RECORDED

Look = Callable[..., Facts]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(256, 512), nn.Linear(512, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.fixture
def decoder() -> nn.Module:
    return convert_to_float8_training(Decoder().bfloat16())


def test_an_eager_decoder(decoder: nn.Module, look: Look) -> None:
    finding = eager_float8(look(decoder, tokens=4096))
    assert isinstance(finding, Finding)
    assert finding.title == "6 of 6 FP8 Linears are not compiled"
    assert finding.saving_ms is not None
    assert finding.saving_ms.low > 0
    assert finding.saving_ms.basis == "modelled"
    assert finding.treatment is not None
    assert finding.treatment.code == "for block in model.blocks:\n    block.compile()"


@pytest.mark.parametrize(("tokens", "host"), [(256, True), (262_144, False)])
def test_with_few_tokens_it_is_the_host_that_the_casts_keep_busy(
    tokens: int, host: bool, decoder: nn.Module, look: Look
) -> None:
    finding = eager_float8(look(decoder, tokens=tokens))
    assert isinstance(finding, Finding)
    assert ("launching them keeps the host busy for 10 ms" in finding.explanation) == host
    assert "cost 0 ms" not in finding.explanation


def test_the_printed_treatment_makes_it_silent(decoder: nn.Module, look: Look) -> None:
    finding = eager_float8(look(decoder, tokens=4096))
    assert isinstance(finding, Finding)
    assert finding.treatment is not None
    exec(finding.treatment.code, {"model": decoder})
    assert eager_float8(look(decoder, tokens=4096)) is None


class InDict(nn.Module):
    """Blocks in a ModuleDict, which iterates over its keys, and a head beside them that was converted too."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({f"layer-{i}": Block() for i in range(2)})
        self.head = nn.Linear(256, 512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks.values():
            x = block(x)
        return self.head(x)


class InSequentials(nn.Module):
    """Blocks of a class of torch.nn, which ``.compile()`` in place does not compile before torch 2.15."""

    def __init__(self, container: Callable[[list[nn.Module]], nn.Module]) -> None:
        super().__init__()
        self.blocks = container(
            [nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)) for _ in range(3)]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks.children():
            x = block(x)
        return x


@pytest.mark.parametrize(
    ("build", "code"),
    [
        (InDict, "for block in model.blocks.values():\n    block.compile()\nmodel.head.compile()"),
        (lambda: nn.Sequential(*(Block() for _ in range(2))), "for block in model:\n    block.compile()"),
        (
            lambda: nn.Sequential(nn.Linear(256, 256), Decoder()),
            "for block in model[1].blocks:\n    block.compile()\nmodel[0].compile()",
        ),
        (
            lambda: nn.Sequential(*(nn.Linear(256, 256) for _ in range(6))),
            f"{WHY_WRAPPED}\nmodel = torch.compile(model)",
        ),
        (lambda: nn.DataParallel(Decoder()), "for block in model.module.blocks:\n    block.compile()"),
        (
            lambda: InSequentials(nn.ModuleList),
            f"{WHY_WRAPPED}\nfor i, block in enumerate(model.blocks):\n    model.blocks[i] = "
            "torch.compile(block)",
        ),
        (
            lambda: InSequentials(
                lambda blocks: nn.ModuleDict({str(i): block for i, block in enumerate(blocks)})
            ),
            f"{WHY_WRAPPED}\nfor i, block in model.blocks.items():\n    model.blocks[i] = "
            "torch.compile(block)",
        ),
        (
            lambda: nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(2))),
            f"{WHY_WRAPPED}\nfor i, block in enumerate(model):\n    model[i] = torch.compile(block)",
        ),
    ],
    ids=[
        "dict",
        "root",
        "inside a Sequential",
        "no blocks",
        "data parallel",
        "Sequentials",
        "Sequentials in a dict",
        "Sequentials in one",
    ],
)
def test_the_printed_treatment_runs_wherever_the_blocks_are(
    build: Callable[[], nn.Module], code: str, look: Look
) -> None:
    model = convert_to_float8_training(build().bfloat16())
    finding = eager_float8(look(model, tokens=4096))
    assert isinstance(finding, Finding)
    assert finding.treatment is not None
    assert finding.treatment.code == code
    names = {"model": model, "torch": torch}
    exec(finding.treatment.code, names)
    model = names["model"]
    assert eager_float8(look(model, tokens=4096)) is None
    assert compile_without_effect(look(model, tokens=4096)) is None
    assert only_linears_compiled(look(model, tokens=4096)) is None


def compile_in_place(model: Any) -> Any:
    model.compile()
    return model


def compile_forwards(model: Any) -> Any:
    for block in model.blocks:
        block.forward = torch.compile(block.forward)
    return model


def compile_children(model: Any) -> Any:
    model.blocks = nn.ModuleList(torch.compile(block) for block in model.blocks)
    return model


@pytest.mark.parametrize("compiled", [torch.compile, compile_in_place, compile_forwards, compile_children])
def test_every_form_of_compile_is_seen(
    compiled: Callable[[Any], Any], decoder: nn.Module, look: Look
) -> None:
    assert eager_float8(look(compiled(decoder), tokens=4096)) is None


def test_one_block_left_out(decoder: nn.Module, look: Look) -> None:
    for block in decoder.blocks[:2]:
        block.compile()
    finding = eager_float8(look(decoder, tokens=4096))
    assert isinstance(finding, Finding)
    assert finding.title == (
        "2 of 6 FP8 Linears are not compiled: blocks.2.up (256 x 512) and blocks.2.down (512 x 256)"
    )
    assert finding.explanation.startswith("Not compiled: model.blocks[2].up, model.blocks[2].down. Each ")
    assert finding.evidence["first"] == "blocks.2.up"


def test_which_are_eager_is_said_of_three(decoder: nn.Module, look: Look) -> None:
    assert "Not compiled: " not in eager(look(decoder, tokens=4096)).explanation, "all of them"
    decoder.blocks[0].compile()
    found = eager(look(decoder, tokens=4096))
    assert found.explanation.startswith(
        "Not compiled: model.blocks[1].up, model.blocks[1].down, model.blocks[2].up and 1 more. Each "
    )


def test_a_layer_beside_compiled_blocks_is_compiled_alone(look: Look) -> None:
    model = convert_to_float8_training(InDict().bfloat16())
    for block in model.blocks.values():
        block.compile()
    finding = eager(look(model, tokens=4096))
    assert finding.explanation.startswith("Not compiled: model.head. ")
    assert finding.treatment is not None
    assert (finding.treatment.name, finding.treatment.code) == ("compile-layers", "model.head.compile()")
    exec(finding.treatment.code, {"model": model})
    for check in (eager_float8, compile_without_effect, only_linears_compiled):
        assert check(look(model, tokens=4096)) is None


def test_blocks_that_are_eager_too_are_no_reason_to_compile_a_head_alone(look: Look) -> None:
    model = InDict().bfloat16()
    convert_to_float8_training(model, module_filter_fn=lambda layer, name: name == "head")
    finding = eager(look(model, tokens=4096))
    assert finding.treatment is not None
    assert finding.treatment.code == "model.compile()"


def eager(facts: Facts) -> Finding:
    finding = eager_float8(facts)
    assert isinstance(finding, Finding)
    return finding


def test_bf16_does_not_need_it(look: Look) -> None:
    assert isinstance(eager_float8(look(Decoder().bfloat16(), tokens=4096)), NotApplicable)


def test_an_eager_head_of_a_vocabulary_beside_compiled_blocks_is_left_out(look: Look) -> None:
    config = LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=2, vocab_size=512, use_cache=False
    )
    with torch.device("meta"):
        model = convert_to_float8_training(LlamaForCausalLM(config).bfloat16())
    for layer in model.model.layers:
        layer.compile()
    finding = eager_float8(look(model, tokens=4096))
    assert isinstance(finding, Finding)
    assert finding.treatment is not None
    assert (finding.treatment.name, finding.treatment.layers) == ("keep-in-bf16", ("lm_head",))


def test_a_head_that_no_gpu_runs_is_left_out_and_not_compiled(look: Look) -> None:
    """Of 1000 classes, as every image model on ImageNet has it."""
    model = InDict().bfloat16()
    model.head = nn.Linear(256, 1000, dtype=torch.bfloat16)
    convert_to_float8_training(model)
    code = eager(look(model, tokens=4096)).treatment
    assert code is not None
    assert "head" not in code.code
    for block in model.blocks.values():
        block.compile()
    finding = eager(look(model, tokens=4096))
    assert finding.treatment is not None
    assert (finding.treatment.name, finding.treatment.layers) == ("keep-in-bf16", ("head",))


def test_under_unsloth_which_compiles_the_blocks_itself_nobody_knows() -> None:
    report = load_report(RECORDED / "h200-unsloth_float8_training.json.gz")
    (outcome,) = (each for each in report.outcomes if each.code == "CMP001")
    assert (outcome.outcome, outcome.reason) == (
        "unknown",
        "Unsloth compiles blocks itself; fp8doctor did not see if it did",
    )
    assert "CMP001" not in {finding.code for finding in report.findings}
