"""The lines that compile the blocks of a transformers model switch off the KV cache that it builds, wherever
it is configured."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

from fp8doctor.analysis.compile_coverage import compile_treatment
from fp8doctor.facts import Facts
from tests.examine.models import SIZES, llama, lora, network, training


def gemma() -> nn.Module:
    """A model whose text has a configuration of its own inside of the model's."""
    text, vision = {**SIZES, "use_cache": True}, {**SIZES, "image_size": 32, "patch_size": 8}
    with torch.device("meta"):
        return Gemma3ForConditionalGeneration(Gemma3Config(text_config=text, vision_config=vision))


def facts_of(model: nn.Module) -> Facts:
    return Facts(network=network(model), training=training(model.train()))


@pytest.mark.parametrize(
    ("build", "line"),
    [
        (lambda: llama("meta", use_cache=True), "model.config.use_cache = False"),
        (lambda: lora(llama("meta", use_cache=True)), "model.base_model.model.config.use_cache = False"),
        (gemma, "model.model.language_model.config.use_cache = False"),
        (lambda: llama("meta"), None),
    ],
    ids=["llama", "LoRA", "nested", "off already"],
)
def test_the_cache_goes_where_blocks_are_compiled(build: Callable[[], nn.Module], line: str | None) -> None:
    model = build()
    facts = facts_of(model)
    code = compile_treatment(
        facts, [linear for linear in facts.network.linears if "layers" in linear.name]
    ).code
    assert [each.partition("   #")[0] for each in code.splitlines() if "use_cache" in each] == (
        [line] if line else []
    )
    exec(code, {"model": model, "torch": torch})
    assert training(model).use_cache is False
    assert any(blocks.compiled == blocks.count for blocks in network(model).blocks)
