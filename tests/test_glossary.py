"""The words: each is found, is short, is true where something installed can tell, and leads on."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from accelerate.utils import FP8RecipeKwargs
from click.testing import CliRunner
from torchao.float8 import Float8LinearConfig
from torchao.float8.config import Float8LinearRecipeName
from transformers import TrainingArguments

from fp8doctor import glossary, registry
from fp8doctor.analysis.step_difference import PART_NAMES
from fp8doctor.analysis.treatment_table import variant
from fp8doctor.areas import AREAS
from fp8doctor.cli import main
from fp8doctor.cli.explain import named_by, speaking_of
from fp8doctor.cost import GPUS, amdahl
from fp8doctor.glossary import look_up
from fp8doctor.known_errors import recognise
from fp8doctor.render import detail_tables, screen, timing, words

CATALOGUE = registry.discover()
CODES = {check.code for check in CATALOGUE}

LONGEST_SENTENCE = 200
"""Characters: two lines."""


def explained(*words: str) -> str:
    result = CliRunner().invoke(main, ["explain", *words])
    assert result.exit_code == 0, result.stderr
    return result.stdout


def test_every_name_finds_its_own_word() -> None:
    for word in glossary.words():
        for name in word.names:
            assert look_up(name) == (name, word), "two words share a name, or one stands there twice"


def test_nothing_else_answers_first() -> None:
    """A check's name shows its page, and a known error what is known of it; a word stands behind both."""
    for word in glossary.words():
        for name in word.names:
            assert named_by(name.split(), CATALOGUE) == [], name
            assert recognise(name) == () or name == "invalid python storage"


def test_every_word_is_short_and_leads_to_checks_that_exist() -> None:
    for word in glossary.words():
        assert word.says.endswith("."), word
        assert len(word.says) <= LONGEST_SENTENCE, word
        assert set(word.codes) <= CODES, word


def test_every_word_of_the_tables_is_explained() -> None:
    heads = (*timing.COLUMNS, "idle", "total", "GiB", "ms/step", "speed", screen.NOISY, *detail_tables.HEADS)
    parts = (*words.FAMILIES, *PART_NAMES.values(), words.NOT_PROFILED)
    labels = [variant(name, fp8=True) for name in ("as_is", "bf16_compiled", "prescribed", "combination")]
    recipes = [variant(f"recipe-{each.value}", fp8=True) for each in Float8LinearRecipeName]
    recipes = [each.removeprefix("FP8 ") for each in recipes]
    assert [each for each in (*heads, *parts, *labels, *recipes) if look_up(each) is None] == []
    layouts = ("output", "input gradient", "weight gradient")
    assert all(look_up(each) for each in layouts)
    assert [area for area in AREAS if look_up(area) is None and not speaking_of(area, CATALOGUE)] == []


@pytest.mark.parametrize(
    ("word", "first"),
    [
        ("load_in_fp8", "MOD003"),
        ("fp8_training", "ENV001"),
        ("FP8RecipeKwargs", "ENV008"),
        ("SFTTrainer", "ENV001"),
        ("FastLanguageModel", "ENV001"),
        ("FULL_SHARD", "DST001"),
        ("4bit", "MOD009"),
        ("qlora", "MOD009"),
        ("max-autotune", "STP001"),
        ("torch compile", "CMP001"),
        ("tokens/s", "STP003"),
        ("50257", "SHP008"),
        ("host bound", "STP001"),
        ("gradient accumulation", "SHP003"),
        ("AMP scaler", "GPU001"),
        ("slow convergence", "NUM002"),
        ("slower than BF16", "CMP001"),
        ("padding to 16", "SHP001"),
        ("pad to multiples of 16", "SHP001"),
        ("gradient overflow", "NUM002"),
    ],
)
def test_the_words_of_a_user_lead_to_a_page(word: str, first: str) -> None:
    assert f"More: fp8doctor explain {first}" in explained(word)


def test_a_word_is_explained_in_its_own_spelling() -> None:
    assert explained("4BIT").startswith("4-bit (QLoRA): ")
    assert explained("amax").startswith("amax: The largest magnitude")
    told = json.loads(explained("delayed", "scaling", "--format", "json"))
    assert (told["word"], told["checks"][0]["code"]) == ("delayed scaling", "SHP005")


def test_a_phrase_is_told_by_the_longest_word_in_it_unless_a_page_has_it() -> None:
    found = glossary.within("our gradient checkpointing of blocks")
    assert found
    assert found[0] == "gradient checkpointing"
    assert glossary.within("a headless tailscale") is None
    assert glossary.within("RuntimeError of padding " + "x" * 100) is None
    assert explained("LoRA", "rank").startswith("LORA001")
    for error in ("ValueError: padding is odd", "padding: odd"):
        assert CliRunner().invoke(main, ["explain", error]).exit_code == 2


def test_words_that_nothing_has_are_not_called_an_error() -> None:
    result = CliRunner().invoke(main, ["explain", "purple", "elephants"])
    assert result.exit_code == 2
    assert "no page and no glossary entry has these words" in result.stderr


@pytest.mark.slow
def test_a_misspelled_word_is_guessed() -> None:
    for typed, meant in (("tensorwize", "tensorwise"), ("load_fp8", "load_in_fp8"), ("qlra", "QLoRA")):
        result = CliRunner().invoke(main, ["explain", typed])
        assert result.exit_code == 2
        assert f"(did you mean {meant}" in result.stderr


def test_a_long_text_is_looked_up_in_no_time() -> None:
    assert look_up("x" * 10_000_000) is None
    assert glossary.alike("zzzzzzzz") == []


def test_numbers_and_names_are_those_of_the_libraries() -> None:
    shares = f"{amdahl(0.6, 1.5):.2f}x, not 1.5x. At 80% it gains {amdahl(0.8, 1.5):.2f}x"
    assert shares in said("Amdahl")
    assert "±448" in said("E4M3")
    assert torch.finfo(torch.float8_e4m3fn).max == 448
    assert "±57,344" in said("E5M2")
    assert torch.finfo(torch.float8_e5m2).max == 57_344
    modes = torch._inductor.list_mode_options()
    graphs = {name for name, options in modes.items() if options.get("triton.cudagraphs")}
    assert graphs == {"reduce-overhead", "max-autotune"}
    assert "no FP8 argument" in said("Trainer")
    assert not [each.name for each in dataclasses.fields(TrainingArguments) if "fp8" in each.name]
    assert "deprecated" in said("FP8RecipeKwargs")
    assert "Deprecated" in (FP8RecipeKwargs.__doc__ or "")
    assert "forward only" in said("fast accumulation")
    config = Float8LinearConfig()
    assert config.gemm_config_output.use_fast_accum
    assert not config.gemm_config_grad_input.use_fast_accum
    assert not config.gemm_config_grad_weight.use_fast_accum
    assert "twice its BF16 peak" in said("peak")
    peaks = [(spec.fp8_tflops, spec.bf16_tflops) for spec in GPUS if spec.fp8_tflops and spec.bf16_tflops]
    assert peaks
    assert all(fp8 == pytest.approx(2 * bf16, rel=0.02) for fp8, bf16 in peaks)


def said(name: str) -> str:
    found = look_up(name)
    assert found
    return found[1].says
