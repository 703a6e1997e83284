"""What the installed torch compiles in place, compiles again and gives up, through CMP002 and CMP005."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn

from fp8doctor.trial.measure.evidence import _left_eager
from tests.checks.compilation.test_compile_without_effect import linear, stack
from tests.checks.compilation.test_recompilation import AGAIN, cached, text
from tests.checks.models import by_block
from tests.checks.rules import Look, finding_of, fix_of, found_by, outcome_of
from tests.checks.trials import tried


@pytest.mark.skipif(
    hasattr(torch._dynamo.eval_frame.OptimizedModule, "_should_wrap_module_call_impl"),
    reason="this torch compiles them (seen in 2.14.1)",
)
def test_in_place_on_classes_of_torch(look: Look) -> None:
    """Dynamo skips the frame of an nn.Sequential: its Linears are compiled one by one, or not at all."""
    model = stack(*[linear] * 6)
    model.compile()
    rules = ("eager-float8", "only-linears-compiled")
    (finding,) = filter(None, (finding_of(rule, look(model, tokens=1024)) for rule in rules))
    names: dict[str, Any] = {"model": model, "torch": torch}
    exec(finding.treatment.code, names)  # type: ignore[union-attr]
    assert {outcome_of(rule, look(names["model"], tokens=1024)) for rule in rules} == {"silent"}


def test_the_trial_sees_the_blocks_that_the_cache_leaves_eager() -> None:
    finding = found_by(AGAIN, tried(cached(10), text(), "as_is"))
    assert (finding.severity, finding.treatment.name) == ("warning", "cache-off")
    assert finding.evidence["left_eager"]
    without = text() | {"use_cache": False}  # a step that switches the cache off itself
    assert outcome_of(AGAIN, tried(cached(10), without, "as_is")) == "silent"


class Numbered(nn.Module):
    """A block that asks for its number: each needs a version of its own, as does each number of rows."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.up, self.number = nn.Linear(16, 16), number

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x) * (self.number + 1)


def numbered(blocks: int) -> nn.Module:
    model = nn.Sequential(*(Numbered(number) for number in range(blocks)))
    by_block(model, backend="eager", dynamic=False)
    return model


def test_blocks_that_differ() -> None:
    finding = found_by(AGAIN, tried(numbered(11), torch.ones(4, 16), "as_is"))
    assert (finding.severity, finding.evidence["left_eager"]) == ("warning", ("Numbered.forward",))
    assert finding.treatment.name == "raise-recompile-limit"


@pytest.mark.parametrize("words", ["Dynamo recompile limit exceeded", "recompile_limit", "cache_size_limit"])
def test_the_words_of_every_torch_for_a_frame_that_is_given_up(words: str) -> None:
    """Said by torch 2.13, 2.9 and 2.6."""
    where = {"co_name": "forward", "co_filename": "model.py", "co_firstlineno": 1}
    named = SimpleNamespace(compile_id="0/0", fail_reason=None, **where)
    failed = SimpleNamespace(compile_id="0/8", fail_reason=f"{words} reached", co_name=None)
    assert _left_eager([named, failed], nn.Identity()) == ("forward",)


def shrinking(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """A step whose micro-batches all have a length of their own."""
    return sum(model(batch[:rows]).mean() for rows in range(2, 14))  # type: ignore[return-value]


@pytest.mark.skipif(
    not hasattr(torch._dynamo.utils.CompilationMetrics, "recompile_reason"),
    reason="torch 2.6 records no reason",
)
def test_lengths_that_vary() -> None:
    facts = tried(numbered(1), torch.ones(16, 16), "as_is", training_step=shrinking)
    assert (found_by(AGAIN, facts).severity, fix_of(AGAIN, facts).name) == ("warning", "pad-to-few-lengths")
