"""Which cuts are made, and how they add up to the whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from fp8doctor.trial.copies.depth import Cut, NotTheCut, Plan, Stack, compare, plans


def llama(layers: int) -> nn.Module:
    with torch.device("meta"):
        return LlamaForCausalLM(
            LlamaConfig(
                hidden_size=64,
                intermediate_size=128,
                num_hidden_layers=layers,
                num_attention_heads=4,
                vocab_size=128,
            )
        )


def kept(model: nn.Module, *lists: str) -> list[dict[str, int]]:
    return cuts(plans(model, lists)[0])


def cuts(made: Plan) -> list[dict[str, int]]:
    return [dict(cut.kept) for cut in made.cuts]


def test_a_decoder_is_cut_at_two_depths() -> None:
    assert kept(llama(32), "model.layers") == [{"model.layers": 4}, {"model.layers": 12}]


def test_smaller_cuts_follow_for_a_memory_that_is_too_small() -> None:
    smaller = [
        [{"model.layers": shallow}, {"model.layers": deep}] for shallow, deep in ((4, 12), (2, 6), (1, 3))
    ]
    assert list(map(cuts, plans(llama(32), ["model.layers"]))) == smaller
    with_weights = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=8, intermediate_size=8, num_hidden_layers=8, num_attention_heads=1, vocab_size=8
        )
    )
    assert list(map(cuts, plans(with_weights, ["model.layers"]))) == [[{}], *smaller[1:]]


@pytest.mark.parametrize(
    ("blocks", "roomy", "as_one", "whole"),
    [(32, True, False, True), (33, True, False, False), (32, False, False, False), (32, True, True, False)],
)
def test_a_model_of_some_blocks_is_measured_whole_where_the_memory_is_roomy_for_it(
    blocks: int, roomy: bool, as_one: bool, whole: bool
) -> None:
    model = nn.ModuleDict({"first": blocks_of(blocks - 2), "second": blocks_of(2)})
    first, *smaller = plans(model, ["first", "second"], as_one=as_one, roomy=roomy)
    assert first.whole == whole
    assert smaller == plans(model, ["first", "second"], as_one=as_one)[0 if whole else 1 :]


def blocks_of(count: int) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(4, 4) for _ in range(count))


def test_a_short_list_is_measured_whole() -> None:
    made = plans(nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(8, 8) for _ in range(24))}), ["layers"])[0]
    assert made.whole
    assert made.full([12.5]) == 12.5


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
    assert kept(model, "model.layers") == [{"model.layers": 6}, {"model.layers": 12}]


def test_an_encoder_and_a_decoder_take_one_cut_more() -> None:
    with torch.device("meta"):
        model = T5ForConditionalGeneration(
            T5Config(
                d_model=32, d_kv=8, d_ff=64, num_layers=26, num_decoder_layers=30, num_heads=4, vocab_size=64
            )
        )
    lists = ["encoder.block", "decoder.block"]
    assert [{name.split(".")[0]: count for name, count in cut.items()} for cut in kept(model, *lists)] == [
        {"encoder": 5, "decoder": 5},
        {"encoder": 13, "decoder": 5},
        {"encoder": 5, "decoder": 13},
    ]


class Dense(nn.Linear):
    pass


def test_special_blocks_at_the_front_are_kept() -> None:
    model = nn.ModuleDict({"layers": nn.ModuleList([Dense(8, 8), *(nn.Linear(8, 8) for _ in range(29))])})
    made = plans(model, ["layers"])[0]
    assert made.stacks == (Stack("layers", 30, 1, 1),)
    assert [dict(cut.kept) for cut in made.cuts] == [{"layers": 5}, {"layers": 13}]


def test_a_cut_from_the_users_function_has_to_be_that_cut() -> None:
    whole = llama(32)
    compare(whole, llama(4), "model.layers", 4)
    other, frozen = llama(4), llama(4)
    other.lm_head = nn.Linear(64, 64, device="meta")
    frozen.model.layers[2].requires_grad_(False)  # type: ignore[index, union-attr]
    for wrong in (llama(3), llama(5), other, frozen):
        with pytest.raises(NotTheCut):
            compare(whole, wrong, "model.layers", 4)


@pytest.mark.slow
@given(
    counts=st.lists(st.integers(9, 200), min_size=1, max_size=3),
    fixed=st.floats(0, 100),
    slopes=st.lists(st.floats(0, 10), min_size=3, max_size=3),
)
def test_a_linear_cost_is_predicted_exactly(counts: list[int], fixed: float, slopes: list[float]) -> None:
    stacks = tuple(Stack(str(i), count, 0, 1) for i, count in enumerate(counts))
    base: dict[str, int] = {stack.name: 2 for stack in stacks}
    made = Plan(stacks, (Cut(base), *(Cut({**base, stack.name: 6}) for stack in stacks)))

    def cost(blocks: Any) -> float:
        return fixed + sum(slope * blocks[str(i)] for i, slope in enumerate(slopes[: len(counts)]))

    whole = cost({str(i): count for i, count in enumerate(counts)})
    assert made.full([cost(cut.kept) for cut in made.cuts]) == pytest.approx(whole, rel=1e-9, abs=1e-6)
    assert sum(made.weights()) == pytest.approx(1.0)
