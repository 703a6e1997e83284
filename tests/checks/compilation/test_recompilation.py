"""CMP005 on transformers models whose cache recompiles every block, and on modules that recompile for reasons
of their own."""

from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

from tests.checks.models import by_block
from tests.checks.rules import Look, fix_of, found_by, outcome_of
from tests.checks.trials import tried
from tests.examine.models import SIZES, llama

pytestmark = pytest.mark.slow

AGAIN = "recompilation"

LIMIT = (
    "recompile_limit" if hasattr(torch._dynamo.config, "recompile_limit") else "cache_size_limit"
)  # the latter in torch 2.6


def cached(layers: int, compiled: bool = True) -> Any:
    """A Llama with a cache, and compiled blocks."""
    model = llama(num_hidden_layers=layers, hidden_size=32, intermediate_size=32, use_cache=True)
    by_block(model.model.layers if compiled else [model], backend="eager")
    return model.train()


def text() -> dict[str, torch.Tensor]:
    ids = torch.zeros((1, 16), dtype=torch.long)
    return {"input_ids": ids, "labels": ids}


def test_a_cache_in_compiled_blocks_is_switched_off_by_the_printed_line(look: Look) -> None:
    """Fewer blocks than the limit are information."""
    assert found_by(AGAIN, look(cached(8))).severity == "info"
    model = cached(9)
    finding = found_by(AGAIN, look(model))
    assert (finding.severity, finding.evidence["blocks_with_cache"]) == ("warning", 9)
    with torch._dynamo.config.patch({LIMIT: 16}):
        assert found_by(AGAIN, look(model)).severity == "info"
    assert finding.treatment.name == "cache-off"
    exec(finding.treatment.code, {"model": model})
    assert outcome_of(AGAIN, look(model)) == "not_applicable"
    assert outcome_of(AGAIN, tried(model, text(), "as_is")) == "silent"


def test_a_cache_that_compiles_nothing_again(look: Look) -> None:
    checkpointed = cached(12)
    checkpointed.gradient_checkpointing_enable()
    for model in (checkpointed, cached(12, compiled=False)):
        assert outcome_of(AGAIN, look(model)) == "not_applicable"


def test_the_blocks_that_hold_the_cache_are_counted(look: Look) -> None:
    sizes = SIZES | {"num_hidden_layers": 10, "use_cache": True}
    vision = {**sizes, "num_hidden_layers": 12, "image_size": 32, "patch_size": 8}
    with torch.device("meta"):
        model = Gemma3ForConditionalGeneration(Gemma3Config(text_config=sizes, vision_config=vision)).train()
    lists = {len(module): module for module in model.modules() if isinstance(module, nn.ModuleList)}
    for length, outcome in ((12, "not_applicable"), (10, "fires")):
        by_block(lists[length])
        assert outcome_of(AGAIN, look(model)) == outcome
    exec(fix_of(AGAIN, look(model)).code, {"model": model})
    assert look(model).training.use_cache is False
