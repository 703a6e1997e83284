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
    LlamaForCausalLM,
    PaliGemmaConfig,
    PaliGemmaForConditionalGeneration,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
)

from fp8doctor.analysis.compile_coverage import cache_off
from fp8doctor.checks.compilation.recompilation import cached_blocks, recompilation
from fp8doctor.facts import Facts
from fp8doctor.facts.arm_names import Reason
from fp8doctor.finding import Finding, NotApplicable
from fp8doctor.trial.measure.evidence import _left_eager
from tests.checks.trials import tried
from tests.examine.models import llama

pytestmark = pytest.mark.slow

Look = Callable[..., Facts]

LIMIT = (
    "recompile_limit" if hasattr(torch._dynamo.config, "recompile_limit") else "cache_size_limit"
)  # the latter in torch 2.6
SAYS_WHY = hasattr(torch._dynamo.utils.CompilationMetrics, "recompile_reason")
"""Whether Dynamo records why it compiles again."""


def compiled_llama(layers: int, **settings: Any) -> LlamaForCausalLM:
    model = llama(num_hidden_layers=layers, hidden_size=32, intermediate_size=32, **settings)
    for block in model.model.layers:
        block.compile(backend="eager")
    return model.train()


def text() -> dict[str, torch.Tensor]:
    ids = torch.zeros((1, 16), dtype=torch.long)
    return {"input_ids": ids, "labels": ids}


@pytest.fixture
def fresh_dynamo() -> Any:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


@pytest.mark.nightly
@pytest.mark.parametrize(("use_cache", "compiled"), [(True, 8), (False, 1)])
def test_what_the_page_says_of_dynamo(use_cache: bool, compiled: int, fresh_dynamo: None) -> None:
    model = compiled_llama(12, use_cache=use_cache)
    model(**text()).loss.backward()
    assert torch._dynamo.utils.counters["frames"]["ok"] == compiled


def test_a_cache_in_twelve_compiled_blocks(look: Look) -> None:
    finding = recompilation(look(compiled_llama(12, use_cache=True)))
    assert isinstance(finding, Finding)
    assert finding.severity == "warning"
    assert finding.title == "A KV cache leaves 4 of 12 blocks uncompiled in training"
    assert finding.treatment is not None
    assert finding.treatment.name == "cache-off"


def test_the_printed_treatment_makes_it_silent(look: Look) -> None:
    model = compiled_llama(12, use_cache=True)
    finding = recompilation(look(model))
    assert isinstance(finding, Finding)
    assert finding.treatment is not None
    assert finding.treatment.code == "model.config.use_cache = False"
    exec(finding.treatment.code, {"model": model})
    assert isinstance(recompilation(look(model)), NotApplicable)
    assert recompilation(tried(model, text(), "as_is")) is None


def test_few_blocks_are_information(look: Look) -> None:
    finding = recompilation(look(compiled_llama(3, use_cache=True)))
    assert isinstance(finding, Finding)
    assert (finding.severity, finding.title) == (
        "info",
        "A KV cache makes 3 blocks compile 3 times instead of once",
    )


def test_a_limit_that_was_raised(look: Look) -> None:
    with torch._dynamo.config.patch({LIMIT: 16}):
        finding = recompilation(look(compiled_llama(12, use_cache=True)))
    assert isinstance(finding, Finding)
    assert (finding.severity, finding.evidence["recompile_limit"]) == ("info", 16)


def test_checkpointing_switches_the_cache_off(look: Look) -> None:
    model = compiled_llama(12, use_cache=True)
    model.gradient_checkpointing_enable()
    assert isinstance(recompilation(look(model)), NotApplicable)


def test_a_model_compiled_as_one_keeps_its_cache(look: Look) -> None:
    model = llama(num_hidden_layers=12, use_cache=True).train()
    model.compile(backend="eager")
    assert isinstance(recompilation(look(model)), NotApplicable)


def test_without_compile_there_is_nothing_to_recompile(look: Look) -> None:
    assert isinstance(recompilation(look(llama(num_hidden_layers=12, use_cache=True))), NotApplicable)


@pytest.mark.nightly
def test_the_trial_sees_the_blocks_that_the_cache_leaves_eager() -> None:
    finding = recompilation(tried(compiled_llama(10, use_cache=True), text(), "as_is"))
    assert isinstance(finding, Finding)
    assert finding.severity == "warning"
    assert finding.evidence["left_eager"]
    assert (
        any("cache" in reason or "past_key_values" in reason for reason in finding.evidence["reasons"])
        is SAYS_WHY
    )
    assert finding.treatment is not None
    assert finding.treatment.name == "cache-off"


@pytest.mark.nightly
def test_a_step_that_switches_the_cache_off_itself() -> None:
    model = compiled_llama(10, use_cache=True)
    assert recompilation(tried(model, text() | {"use_cache": False}, "as_is")) is None


class Numbered(nn.Module):
    """A block that asks for its number, so that each needs a version of its own."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.up, self.number = nn.Linear(16, 16), number

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x) * (self.number + 1)


class Growing(nn.Module):
    """A block whose every call needs a version of its own."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.up, self.calls = nn.Linear(16, 16), [number]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.append(0)
        return self.up(x) * len(self.calls)


class Lengths(nn.Module):
    """Every call of the block sees another number of rows, and the block depends on it."""

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
    finding = recompilation(tried(stack(Numbered, 11), torch.ones(4, 16), "as_is"))
    assert isinstance(finding, Finding)
    assert finding.title == "Numbered.forward reached the recompile limit and is no longer compiled"
    assert finding.severity == "warning"
    assert finding.treatment is not None
    assert finding.treatment.name == "raise-recompile-limit"
    assert finding.treatment.code == f"torch._dynamo.config.{LIMIT} = 64"


@pytest.mark.parametrize(
    "words",
    [
        "Dynamo recompile limit exceeded",
        "recompile_limit reached",
        "accumulated_recompile_limit reached",
        "cache_size_limit reached",
    ],
)
def test_the_words_of_every_torch_for_a_frame_that_is_given_up(words: str) -> None:
    """Said by torch 2.13, 2.9 (both) and 2.6."""
    failed = SimpleNamespace(compile_id="0/8", co_name=None, fail_reason=words)
    named = SimpleNamespace(
        compile_id="0/0", co_name="forward", co_filename="model.py", co_firstlineno=1, fail_reason=None
    )
    assert _left_eager([named, failed], nn.Identity()) == ("forward",)


def test_the_raised_limit_makes_it_silent() -> None:
    with torch._dynamo.config.patch({LIMIT: 64}):
        assert recompilation(tried(stack(Numbered, 11), torch.ones(4, 16), "as_is")) is None


@pytest.mark.nightly
def test_recompiling_while_it_is_timed() -> None:
    with torch._dynamo.config.patch({LIMIT: 1000, f"accumulated_{LIMIT}": 1000}):
        facts = tried(stack(Growing, 1), torch.ones(4, 16), "as_is")
    assert facts.trial.arms[0].why is Reason.STILL_COMPILING
    finding = recompilation(facts)
    assert isinstance(finding, Finding)
    assert (finding.severity, finding.title) == (
        "warning",
        "Dynamo was still compiling after the warm-up",
    )


def shrinking(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """A step whose micro-batches all have a length of their own."""
    return sum(model(batch[:rows]).mean() for rows in range(2, 14))  # type: ignore[return-value]


@pytest.mark.skipif(not SAYS_WHY, reason="torch 2.6 has no CompilationMetrics.recompile_reason")
def test_lengths_that_vary() -> None:
    finding = recompilation(tried(stack(Lengths, 1), torch.ones(16, 16), "as_is", training_step=shrinking))
    assert isinstance(finding, Finding)
    assert finding.severity == "warning"
    assert finding.treatment is not None
    assert finding.treatment.name == "pad-to-few-lengths"


SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
TEXT = {**SIZES, "num_hidden_layers": 10, "num_key_value_heads": 2, "vocab_size": 256, "use_cache": True}
VISION = {**SIZES, "num_hidden_layers": 12, "image_size": 32, "patch_size": 8}


def gemma() -> nn.Module:
    return Gemma3ForConditionalGeneration(Gemma3Config(text_config=TEXT, vision_config=VISION))


def paligemma() -> nn.Module:
    text = {**TEXT, "model_type": "gemma", "head_dim": 16}
    vision = {**VISION, "model_type": "siglip_vision_model", "projection_dim": 64}
    return PaliGemmaForConditionalGeneration(
        PaliGemmaConfig(text_config=text, vision_config=vision, projection_dim=64)
    )


def smolvlm() -> nn.Module:
    text = {**TEXT, "model_type": "llama", "pad_token_id": 0}
    return SmolVLMForConditionalGeneration(
        SmolVLMConfig(text_config=text, vision_config=VISION, use_cache=True, pad_token_id=0)
    )


@pytest.mark.parametrize("build", [gemma, paligemma, smolvlm])
def test_the_blocks_that_hold_the_cache_are_counted(build: Callable[[], nn.Module], look: Look) -> None:
    with torch.device("meta"):
        model = build().train()
    lists = {len(module): module for module in model.modules() if isinstance(module, nn.ModuleList)}
    for block in lists[12]:
        block.compile()
    facts = look(model)
    assert facts.training.use_cache is True
    assert cached_blocks(facts) == 0
    for block in lists[10]:
        block.compile()
    facts = look(model)
    assert cached_blocks(facts) == 10
    exec(cache_off(facts), {"model": model})
    assert look(model).training.use_cache is False
