"""CMP005 on transformers models whose cache recompiles every block, and on modules that recompile for reasons
of their own."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
)

from fp8doctor.analysis.compile_coverage import cache_off
from fp8doctor.checks.compilation.recompilation import cached_blocks
from fp8doctor.facts import Facts
from fp8doctor.facts.arm_names import Reason
from fp8doctor.finding import Finding
from fp8doctor.trial.measure.evidence import _left_eager
from tests.checks.arms import failed, timed
from tests.checks.rules import found_by, outcome_of
from tests.checks.trials import tried
from tests.examine.models import llama

pytestmark = pytest.mark.slow

Look = Callable[..., Facts]
AGAIN = "recompilation"

LIMIT = (
    "recompile_limit" if hasattr(torch._dynamo.config, "recompile_limit") else "cache_size_limit"
)  # the latter in torch 2.6
SAYS_WHY = hasattr(torch._dynamo.utils.CompilationMetrics, "recompile_reason")
"""Whether Dynamo records why it compiles again."""


def cached(layers: int, use_cache: bool = True) -> Any:
    """A Llama with compiled blocks."""
    model = llama(num_hidden_layers=layers, hidden_size=32, intermediate_size=32, use_cache=use_cache)
    for block in model.model.layers:
        block.compile(backend="eager")
    return model.train()


def text() -> dict[str, torch.Tensor]:
    ids = torch.zeros((1, 16), dtype=torch.long)
    return {"input_ids": ids, "labels": ids}


def fix_of(finding: Finding) -> str:
    assert finding.treatment is not None
    return finding.treatment.name


def test_a_cache_in_twelve_compiled_blocks_is_switched_off_by_the_printed_line(look: Look) -> None:
    model = cached(12)
    finding = found_by(AGAIN, look(model))
    assert (finding.severity, finding.evidence["blocks_with_cache"], fix_of(finding)) == (
        "warning",
        12,
        "cache-off",
    )
    exec(finding.treatment.code, {"model": model})
    assert outcome_of(AGAIN, look(model)) == "not_applicable"
    assert outcome_of(AGAIN, tried(model, text(), "as_is")) == "silent"


def test_fewer_blocks_than_the_limit_are_information(look: Look) -> None:
    assert found_by(AGAIN, look(cached(8))).severity == "info"
    assert found_by(AGAIN, look(cached(9))).severity == "warning"
    with torch._dynamo.config.patch({LIMIT: 16}):
        assert found_by(AGAIN, look(cached(12))).severity == "info"


def test_a_cache_that_compiles_nothing_again(look: Look) -> None:
    checkpointed, whole = cached(12), llama(num_hidden_layers=12, use_cache=True).train()
    checkpointed.gradient_checkpointing_enable()
    whole.compile(backend="eager")
    for model in (checkpointed, whole):
        assert outcome_of(AGAIN, look(model)) == "not_applicable"


@pytest.mark.nightly
def test_the_trial_sees_the_blocks_that_the_cache_leaves_eager() -> None:
    finding = found_by(AGAIN, tried(cached(10), text(), "as_is"))
    assert (finding.severity, fix_of(finding)) == ("warning", "cache-off")
    assert finding.evidence["left_eager"]
    without = text() | {"use_cache": False}  # a step that switches the cache off itself
    assert outcome_of(AGAIN, tried(cached(10), without, "as_is")) == "silent"


class Numbered(nn.Module):
    """A block that asks for its number, so that each needs a version of its own."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.up, self.number = nn.Linear(16, 16), number

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x) * (self.number + 1)


class Lengths(nn.Module):
    """A block that depends on its number of rows."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.up = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x)


def stack(kind: type[nn.Module], blocks: int) -> nn.Module:
    model = nn.Sequential(*(kind(number) for number in range(blocks)))
    for block in model:
        block.compile(backend="eager", dynamic=False)
    return model


@pytest.mark.nightly
def test_blocks_that_differ() -> None:
    finding = found_by(AGAIN, tried(stack(Numbered, 11), torch.ones(4, 16), "as_is"))
    assert (finding.severity, finding.evidence["left_eager"]) == ("warning", ("Numbered.forward",))
    assert fix_of(finding) == "raise-recompile-limit"


@pytest.mark.parametrize("words", ["Dynamo recompile limit exceeded", "recompile_limit", "cache_size_limit"])
def test_the_words_of_every_torch_for_a_frame_that_is_given_up(words: str) -> None:
    """Said by torch 2.13, 2.9 and 2.6."""
    where = {"co_name": "forward", "co_filename": "model.py", "co_firstlineno": 1}
    named = SimpleNamespace(compile_id="0/0", fail_reason=None, **where)
    failed = SimpleNamespace(compile_id="0/8", fail_reason=f"{words} reached", co_name=None)
    assert _left_eager([named, failed], nn.Identity()) == ("forward",)


def test_compiling_while_it_is_timed(look: Look) -> None:
    late = failed("as_is", "", why=Reason.STILL_COMPILING)
    assert found_by(AGAIN, timed(look(stack(Lengths, 1)), late)).severity == "warning"


def shrinking(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """A step whose micro-batches all have a length of their own."""
    return sum(model(batch[:rows]).mean() for rows in range(2, 14))  # type: ignore[return-value]


@pytest.mark.skipif(not SAYS_WHY, reason="torch 2.6 has no CompilationMetrics.recompile_reason")
def test_lengths_that_vary() -> None:
    finding = found_by(AGAIN, tried(stack(Lengths, 1), torch.ones(16, 16), "as_is", training_step=shrinking))
    assert (finding.severity, fix_of(finding)) == ("warning", "pad-to-few-lengths")


SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
TEXT = {**SIZES, "num_hidden_layers": 10, "num_key_value_heads": 2, "vocab_size": 256, "use_cache": True}
VISION = {**SIZES, "num_hidden_layers": 12, "image_size": 32, "patch_size": 8}


def gemma() -> nn.Module:
    return Gemma3ForConditionalGeneration(Gemma3Config(text_config=TEXT, vision_config=VISION))


def test_the_blocks_that_hold_the_cache_are_counted(look: Look) -> None:
    with torch.device("meta"):
        model = gemma().train()
    lists = {len(module): module for module in model.modules() if isinstance(module, nn.ModuleList)}
    for length, counted in ((12, 0), (10, 10)):
        for block in lists[length]:
            block.compile()
        facts = look(model)
        assert (facts.training.use_cache, cached_blocks(facts)) == (True, counted)
    exec(cache_off(facts), {"model": model})
    assert look(model).training.use_cache is False
