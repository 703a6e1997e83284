"""The state of training as facts, on real objects."""

from collections.abc import Iterable

import torch
from torch import nn
from transformers import HubertConfig, HubertModel, WhisperConfig

from fp8doctor.facts import recorded
from tests.examine.models import Stacked, training

TOKENS = torch.zeros(2, 8, dtype=torch.long)


def test_a_job_that_has_not_begun() -> None:
    facts = training(Stacked())
    assert (facts.autocast, facts.gradients_seen) == (None, False)
    assert facts.compile_marks == facts.checkpointing == facts.forward_chain == ()
    assert (facts.trainer, facts.optimizer, facts.parameters_outside_optimizer) == (None, None, None)


def test_gradients() -> None:
    model = Stacked()
    model(TOKENS).mean().backward()
    assert training(model).gradients_seen is True


def test_autocast_of_the_job_around_forward_or_in_force() -> None:
    assert training(Stacked(), autocast=torch.float16).autocast == "float16"
    model = Stacked()
    model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward)
    assert training(model).autocast == "bfloat16"
    with torch.autocast("cpu", torch.bfloat16):
        assert training(Stacked()).autocast == "bfloat16"
        assert training(Stacked().to("meta")).autocast is None


def test_optimizer() -> None:
    model = Stacked()
    optimizer = torch.optim.AdamW([*model.blocks.parameters(), model.head.weight])
    model.embedding.requires_grad_(False)
    facts = training(model, optimizer=optimizer)
    assert facts.optimizer == "torch.optim.adamw.AdamW"
    assert facts.parameters_outside_optimizer == 2  # the norm's


def test_layers_that_are_skipped_at_random() -> None:
    """As HuBERT has it in its configuration alone, Whisper of encoder and decoder."""
    assert training(Stacked()).layerdrop is None
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    convolutions = {"conv_dim": (16, 16), "conv_stride": (5, 2), "conv_kernel": (10, 2)}
    hubert = HubertConfig(layerdrop=0.1, num_conv_pos_embedding_groups=2, **sizes, **convolutions)
    assert training(HubertModel(hubert)).layerdrop == 0.1
    model = nn.Module()
    model.config = WhisperConfig(encoder_layerdrop=0.05, decoder_layerdrop=0.2)
    assert training(nn.Sequential(model, nn.Linear(4, 4))).layerdrop == 0.2


class Copies:
    """An optimizer that holds copies of the parameters, and nothing else, and is no torch.optim.Optimizer."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.param_groups = [{"params": [each.detach().clone() for each in parameters]}]


def test_an_optimizer_that_holds_copies_cannot_tell() -> None:
    model, gaps = nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32)), dict[str, str]()
    facts = training(model, gaps, optimizer=Copies(model.parameters()))
    assert not recorded(facts, "parameters_outside_optimizer")
    assert "may hold copies" in gaps["training.parameters_outside_optimizer"]
