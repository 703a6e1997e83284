"""CMP001 on real torchao models: the printed lines compile, and what needs no compiler is left alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torchao.float8 import convert_to_float8_training
from torchao.float8.float8_linear import Float8Linear
from transformers import LlamaConfig, LlamaForCausalLM

from fp8doctor.facts import Facts
from fp8doctor.finding import Treatment
from fp8doctor.report import load_report
from tests.checks.rules import found_by, outcome_of
from tests.test_recorded import RECORDED

Look = Callable[..., Facts]
EAGER, ALONE, VAIN = "eager-float8", "only-linears-compiled", "compile-without-effect"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(256, 512), nn.Linear(512, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


class Decoder(nn.Module):
    """Three blocks, in a list or what is given, and a head if it has a width."""

    def __init__(
        self, container: Callable[[list[Any]], Any] = nn.ModuleList, head: int | None = None
    ) -> None:
        super().__init__()
        self.blocks = container([self.block() for _ in range(3)])
        self.head = nn.Linear(256, head) if head else nn.Identity()

    def block(self) -> nn.Module:
        return Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks.children():
            x = block(x)
        return self.head(x)


class OfSequentials(Decoder):
    """Blocks of a class of torch.nn, which ``.compile()`` in place does not compile before torch 2.15."""

    def block(self) -> nn.Module:
        return nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256))


def in_dict(blocks: list[nn.Module]) -> nn.ModuleDict:
    return nn.ModuleDict({f"layer-{i}": block for i, block in enumerate(blocks)})


def float8(build: Callable[[], nn.Module] = Decoder) -> Any:
    return convert_to_float8_training(build().bfloat16())


def fix_of(name: str, facts: Facts) -> Treatment:
    treatment = found_by(name, facts).treatment
    assert treatment is not None
    return treatment


@pytest.mark.parametrize(("tokens", "host"), [(256, True), (65_536, False)])
def test_an_uncompiled_decoder(tokens: int, host: bool, look: Look) -> None:
    """With few tokens it is the host that the casts keep busy."""
    finding = found_by(EAGER, look(float8(), tokens=tokens))
    assert (finding.severity, finding.evidence["eager_linears"]) == ("warning", 6)
    assert (finding.saving_ms.basis, finding.saving_ms.low > 0) == ("modelled", True)
    assert (finding.evidence["modelled_host_ms"] > finding.evidence["modelled_casts_ms"]) is host  # type: ignore[operator]


@pytest.mark.parametrize(
    "build",
    [
        Decoder,
        lambda: Decoder(in_dict, head=512),
        lambda: nn.Sequential(Block(), Block()),
        lambda: nn.Sequential(*(nn.Linear(256, 256) for _ in range(6))),
        lambda: nn.DataParallel(Decoder()),
        lambda: OfSequentials(in_dict),
    ],
    ids=["list", "dict", "root", "no blocks", "parallel", "of torch.nn"],
)
def test_the_printed_lines_compile_wherever_the_blocks_are(
    build: Callable[[], nn.Module], look: Look
) -> None:
    model = float8(build)
    names = {"model": model, "torch": torch}
    exec(fix_of(EAGER, look(model, tokens=4096)).code, names)
    facts = look(names["model"], tokens=4096)
    assert [outcome_of(name, facts) for name in (EAGER, ALONE, VAIN)] == ["silent"] * 3


def in_place(model: Any) -> Any:
    model.compile()
    return model


def compile_forwards(model: Any) -> Any:
    for block in model.blocks:
        block.forward = torch.compile(block.forward)
    return model


@pytest.mark.parametrize("compiled", [torch.compile, in_place, compile_forwards])
def test_every_form_of_compile_is_seen(compiled: Callable[[Any], Any], look: Look) -> None:
    assert outcome_of(EAGER, look(compiled(float8()), tokens=4096)) == "silent"
    assert outcome_of(EAGER, look(Decoder().bfloat16(), tokens=4096)) == "not_applicable"


def test_blocks_left_out_are_named(look: Look) -> None:
    model = float8()
    model.blocks[0].compile()
    finding = found_by(EAGER, look(model, tokens=4096))
    assert (finding.evidence["eager_linears"], finding.evidence["first"]) == (4, "blocks.1.up")


def test_a_layer_beside_compiled_blocks_is_compiled_alone(look: Look) -> None:
    model = float8(lambda: Decoder(head=512))
    for block in model.blocks:
        block.compile()
    treatment = fix_of(EAGER, look(model, tokens=4096))
    assert (treatment.name, treatment.code) == ("compile-layers", "model.head.compile()")
    exec(treatment.code, {"model": model})
    facts = look(model, tokens=4096)
    assert [outcome_of(name, facts) for name in (EAGER, ALONE, VAIN)] == ["silent"] * 3


def test_a_vocabularys_head_beside_compiled_blocks_is_left_out(look: Look) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 512}
    with torch.device("meta"):
        model = float8(lambda: LlamaForCausalLM(LlamaConfig(**sizes, use_cache=False)))
    for block in model.model.layers:
        block.compile()
    treatment = fix_of(EAGER, look(model, tokens=4096))
    assert (treatment.name, treatment.layers) == ("keep-in-bf16", ("lm_head",))


def test_under_unsloth_which_compiles_the_blocks_itself_nobody_knows() -> None:
    report = load_report(RECORDED / "h200-unsloth_float8_training.json.gz")
    assert outcome_of(EAGER, report.facts) == "unknown"
    assert "CMP001" not in {finding.code for finding in report.findings}


def each_in_place(model: Any) -> None:
    for module in model.modules():
        if isinstance(module, Float8Linear):
            module.compile()


def test_linears_that_are_compiled_one_by_one(look: Look) -> None:
    model = float8(lambda: Decoder(head=512))
    each_in_place(model)
    finding = found_by(ALONE, look(model))
    assert (finding.severity, finding.evidence["alone"]) == ("warning", 7)
    assert finding.treatment.name == "compile-blocks"
    exec(finding.treatment.code, {"model": model})
    assert outcome_of(ALONE, look(model)) == "silent"
