"""CMP001 on real torchao models: the printed lines compile, and what needs no compiler is left alone."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torchao.float8.float8_linear import Float8Linear

from fp8doctor.facts import Facts
from tests.checks.models import Block, Decoder, by_block, float8
from tests.checks.rules import Look, fix_of, found_by, outcome_of
from tests.examine.models import llama

EAGER, ALONE, VAIN = "eager-float8", "only-linears-compiled", "compile-without-effect"


def in_dict(blocks: list[nn.Module]) -> nn.ModuleDict:
    return nn.ModuleDict({f"layer-{i}": block for i, block in enumerate(blocks)})


def sequential() -> nn.Module:
    """A block of a class of torch.nn, which ``.compile()`` in place does not compile before torch 2.15."""
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))


def is_silent(facts: Facts) -> bool:
    return {outcome_of(name, facts) for name in (EAGER, ALONE, VAIN)} == {"silent"}


@pytest.mark.parametrize("tokens", [256, 65_536])
def test_an_uncompiled_decoder(tokens: int, look: Look) -> None:
    model = Decoder(block=lambda: Block(256)).bfloat16()
    assert outcome_of(EAGER, look(model, tokens=tokens)) == "not_applicable"
    finding = found_by(EAGER, look(float8(model), tokens=tokens))
    assert (finding.severity, finding.evidence["eager_linears"]) == ("warning", 8)
    assert (finding.saving_ms.basis, finding.saving_ms.low > 0) == ("modelled", True)


@pytest.mark.parametrize(
    "build",
    [
        Decoder,
        lambda: Decoder(in_dict, head=512),
        lambda: nn.Sequential(Block(), Block()),
        lambda: nn.Sequential(*(nn.Linear(64, 64) for _ in range(6))),
        lambda: nn.DataParallel(Decoder()),
        lambda: Decoder(in_dict, sequential),
    ],
    ids=["list", "dict", "root", "no blocks", "parallel", "of torch.nn"],
)
def test_the_printed_lines_compile_wherever_the_blocks_are(
    build: Callable[[], nn.Module], look: Look
) -> None:
    names = {"model": float8(build()), "torch": torch}
    exec(fix_of(EAGER, look(names["model"], tokens=4096)).code, names)
    assert is_silent(look(names["model"], tokens=4096))


def test_blocks_left_out_are_named(look: Look) -> None:
    model = float8(Decoder())
    by_block(model.blocks[:1])
    finding = found_by(EAGER, look(model, tokens=4096))
    assert (finding.evidence["eager_linears"], finding.evidence["first"]) == (6, "blocks.1.up")


def test_a_layer_beside_compiled_blocks_is_compiled_alone_but_no_vocabulary(look: Look) -> None:
    model = float8(Decoder(head=512))
    by_block(model.blocks)
    treatment = fix_of(EAGER, look(model, tokens=4096))
    assert (treatment.name, treatment.code) == ("compile-layers", "model.head.compile()")
    exec(treatment.code, {"model": model})
    assert is_silent(look(model, tokens=4096))
    model = float8(llama("meta", vocab_size=512))
    by_block(model.model.layers)
    treatment = fix_of(EAGER, look(model, tokens=4096))
    assert (treatment.name, treatment.layers) == ("keep-in-bf16", ("lm_head",))


def test_linears_that_are_compiled_one_by_one(look: Look) -> None:
    model = float8(Decoder(head=512))
    by_block(module for module in model.modules() if isinstance(module, Float8Linear))
    finding = found_by(ALONE, look(model))
    assert (finding.severity, finding.evidence["alone"]) == ("warning", 9)
    assert finding.treatment.name == "compile-blocks"
    exec(finding.treatment.code, {"model": model})
    assert outcome_of(ALONE, look(model)) == "silent"
