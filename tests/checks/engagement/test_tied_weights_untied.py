"""MOD008 on models of transformers that Accelerate converted, on model files under watch, and on ties that
are as they should be."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torchao.float8 import convert_to_float8_training

from fp8doctor.checks.engagement.tied_weights_untied import tied_weights_untied
from fp8doctor.examine.fp8_conversion import ConversionWatch
from fp8doctor.facts import Facts, recorded
from fp8doctor.finding import Finding, NotApplicable
from tests.checks.engagement.accelerated import Linear, prepare
from tests.examine.models import gpt2, llama, lora, network
from tests.test_untouched_models import MODELS, Untouched

Look = Callable[..., Facts]


def copied(head: nn.Linear) -> nn.Module:
    """A new layer with a copy of the weight, as Accelerate makes it."""
    new = Linear(head.in_features, head.out_features, bias=False)
    new.weight.data.copy_(head.weight.data)
    return new


def test_accelerate_unties_the_head(
    look: Look, monkeypatch: pytest.MonkeyPatch, forget_accelerate: None
) -> None:
    model = llama(tie_word_embeddings=True)
    assert isinstance(tied_weights_untied(look(model)), NotApplicable)
    model, _ = prepare(monkeypatch, model, torch.optim.SGD(model.parameters()))
    finding = tied_weights_untied(look(model))
    assert isinstance(finding, Finding)
    assert finding.title == "lm_head.weight is no longer tied to model.embed_tokens.weight"
    model.tie_weights()
    assert tied_weights_untied(look(model)) is None


def test_torchao_keeps_ties(look: Look) -> None:
    assert tied_weights_untied(look(convert_to_float8_training(llama(tie_word_embeddings=True)))) is None


@pytest.mark.parametrize(
    "settings",
    [{}, {"modules_to_save": ["lm_head"]}, {"modules_to_save": ["embed_tokens"]}],
    ids=["all linears", "head", "embedding"],
)
def test_peft_leaves_ties_alone(look: Look, settings: dict[str, list[str]]) -> None:
    base = convert_to_float8_training(llama(tie_word_embeddings=True))
    assert tied_weights_untied(look(lora(base, **settings))) is None


def test_a_broken_tie_is_found_behind_wrappers() -> None:
    model = llama(tie_word_embeddings=True)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    assert network(torch.compile(lora(model), backend="eager")).broken_ties == (
        ("base_model.model.lm_head.weight", "base_model.model.model.embed_tokens.weight"),
    )


def test_what_is_untied_on_purpose() -> None:
    assert network(llama(tie_word_embeddings=False)).broken_ties == ()
    assert network(gpt2()).broken_ties == ()
    assert network(nn.Linear(8, 8)).broken_ties == ()


@pytest.mark.nightly
@pytest.mark.parametrize("untouched", MODELS, ids=[each.model for each in MODELS])
def test_no_architecture_is_untied_by_being_built(untouched: Untouched) -> None:
    """Encoder-decoders, towers and heads without an embedding express ties in many ways."""
    gaps: dict[str, str] = {}
    assert network(untouched.build(), gaps).broken_ties == ()
    assert gaps == {}


@pytest.mark.parametrize(
    "name",
    [
        "T5ForConditionalGeneration",
        "BartForConditionalGeneration",
        "GPT2LMHeadModel",
        "BertForMaskedLM",
        "Gemma3ForConditionalGeneration",
    ],
)
def test_a_head_with_a_copy_of_the_embedding_is_found_in_every_kind(name: str) -> None:
    model = next(each for each in MODELS if each.model == name).build()
    head = model.get_output_embeddings()  # type: ignore[operator]
    head.weight = nn.Parameter(head.weight.detach().clone())
    ((first, _),) = network(model).broken_ties
    assert model.get_parameter(first) is head.weight


def test_transformers_4_is_unknown() -> None:
    """A stand-in for 4.x, whose models keep no list of what was tied."""
    model, gaps = llama(), dict[str, str]()
    del model.all_tied_weights_keys
    assert not recorded(network(model, gaps), "broken_ties")
    assert "keeps no list of its tied weights" in gaps["network.broken_ties"]


class Plain(nn.Module):
    """A decoder that ties by hand and declares nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        self.head = nn.Linear(32, 64, bias=False)
        self.head.weight = self.embedding.weight


@pytest.mark.parametrize("tied_again", [False, True])
def test_a_tie_that_is_lost_under_watch(look: Look, tied_again: bool) -> None:
    with ConversionWatch() as watch:
        model = Plain()
        model.head = copied(model.head)
    if tied_again:
        model.head.weight = model.embedding.weight
    answer = tied_weights_untied(look(model, watched=watch))
    assert isinstance(answer, Finding) is not tied_again
    if isinstance(answer, Finding):
        assert answer.title == "head.weight is no longer tied to embedding.weight"
        assert answer.treatment is not None
        assert (
            answer.treatment.code
            == "model.head.weight = model.embedding.weight   # right after the conversion"
        )
