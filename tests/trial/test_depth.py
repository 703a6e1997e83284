"""Which cuts are made, and how they add up to the whole."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, T5Config, T5ForConditionalGeneration

from fp8doctor.trial.copies.depth import Plan, Stack, plans


def linears(count: int) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(4, 4) for _ in range(count))


def without_weights(*counts: int) -> nn.Module:
    with torch.device("meta"):
        return nn.ModuleList(map(linears, counts))


def kept(made: Plan) -> list[tuple[int, ...]]:
    """How many blocks of each list."""
    return [tuple(dict(cut).values()) for cut in made.cuts]


def test_a_model_is_cut_at_two_depths_and_smaller_for_a_memory_that_is_too_small() -> None:
    smaller = [[(4,), (12,)], [(2,), (6,)], [(1,), (3,)]]
    assert list(map(kept, plans(without_weights(32), ["0"]))) == smaller
    with_weights = nn.ModuleList([linears(8)])
    assert list(map(kept, plans(with_weights, ["0"]))) == [[()], *smaller[1:]]
    assert plans(with_weights, ["0"])[0].full([12.5]) == 12.5


@pytest.mark.parametrize(
    ("blocks", "roomy", "as_one", "whole"),
    [(32, True, False, True), (33, True, False, False), (32, False, False, False), (32, True, True, False)],
)
def test_a_model_of_some_blocks_is_measured_whole_where_the_memory_is_roomy_for_it(
    blocks: int, roomy: bool, as_one: bool, whole: bool
) -> None:
    model = nn.ModuleList([linears(blocks - 2), linears(2)])
    first, *smaller = plans(model, ["0", "1"], as_one=as_one, roomy=roomy)
    assert first.whole == whole
    assert smaller == plans(model, ["0", "1"], as_one=as_one)[0 if whole else 1 :]
    assert whole or kept(first) == [(2 if as_one else 4,), (6 if as_one else 12,)]


@pytest.mark.parametrize(
    ("blocks", "cuts"), [(5, [()]), (6, [(1,), (2,)]), (8, [(1,), (3,)]), (16, [(2,), (6,)])]
)
def test_an_own_graph_is_cut_to_at_most_half_of_its_blocks(blocks: int, cuts: list[tuple[int, ...]]) -> None:
    assert kept(plans(nn.ModuleList([linears(blocks)]), ["0"], as_one=True, own=True)[0]) == cuts


def test_alternating_attention_is_cut_in_whole_patterns() -> None:
    config = Gemma3TextConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=36,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
        head_dim=16,
    )
    with torch.device("meta"):
        model = Gemma3ForCausalLM(config)
    assert config.layer_types[:7].count("full_attention") == 1
    assert kept(plans(model, ["model.layers"])[0]) == [(6,), (12,)]


def test_an_encoder_and_a_decoder_take_one_cut_more() -> None:
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_heads": 4, "vocab_size": 64}
    with torch.device("meta"):
        model = T5ForConditionalGeneration(T5Config(num_layers=26, num_decoder_layers=30, **sizes))
    assert kept(plans(model, ["encoder.block", "decoder.block"])[0]) == [(5, 5), (13, 5), (5, 13)]


class Dense(nn.Linear):
    pass


def test_special_blocks_at_the_front_are_kept() -> None:
    made = plans(nn.ModuleList([nn.ModuleList([Dense(8, 8), *linears(29)])]), ["0"])[0]
    assert made.stacks == (Stack("0", 30, 1, 1),)
    assert kept(made) == [(5,), (13,)]


@pytest.mark.slow
@given(
    counts=st.lists(st.integers(9, 200), min_size=1, max_size=3),
    fixed=st.floats(0, 100),
    slopes=st.lists(st.floats(0, 10), min_size=3, max_size=3),
)
def test_a_linear_cost_is_predicted_exactly(counts: list[int], fixed: float, slopes: list[float]) -> None:
    stacks = tuple(Stack(str(i), count, 0, 1) for i, count in enumerate(counts))
    base: dict[str, int] = {stack.name: 2 for stack in stacks}
    made = Plan(stacks, (base, *({**base, stack.name: 6} for stack in stacks)))

    def cost(blocks: Any) -> float:
        return fixed + sum(slope * blocks[str(i)] for i, slope in enumerate(slopes[: len(counts)]))

    whole = cost({str(i): count for i, count in enumerate(counts)})
    assert made.full([cost(cut) for cut in made.cuts]) == pytest.approx(whole, rel=1e-9, abs=1e-6)
    assert sum(made.weights()) == pytest.approx(1.0)
