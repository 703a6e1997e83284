"""How many tokens let layers pay in FP8, and where no number does."""

from __future__ import annotations

import pytest

from fp8doctor.analysis.even import EVEN
from fp8doctor.analysis.layer_gain import gains
from fp8doctor.analysis.losing_layers import losing, losing_body, to_keep
from fp8doctor.analysis.token_crossing import crossing
from fp8doctor.facts import Facts, Network
from tests.analysis.gains import LLAMA_8B, NARROW, SIDES_OF_1B, as_timed, facts, linear, shape, timed

DECODER_468M = (
    (1024, 4096, 48, 0.547, 0.318, 0.297),
    (1024, 1024, 96, 0.161, 0.108, 0.136),
    (4096, 1024, 24, 0.544, 0.316, 0.297),
)


FEW_TOKENS = ((0.073, 0.056, 0.133), (0.072, 0.055, 0.140), (0.034, 0.031, 0.064), (0.027, 0.025, 0.046))


def test_a_decoder_that_gains_in_the_step_is_accused_of_nothing() -> None:
    """decoder_468m on an H200: GEMMs and casts alone 0.81x, the compiled step 1.06x of BF16."""
    of = as_timed(16384, *DECODER_468M)
    assert sum(gain.ms for gain in gains(of).values()) < 0
    assert crossing(of) is None
    assert to_keep(of) == ()


def test_a_batch_of_few_tokens_is_still_one() -> None:
    """few_tokens on an H200: the compiled step runs at 0.60x."""
    of = as_timed(256, *((*sides, *times) for sides, times in zip(SIDES_OF_1B, FEW_TOKENS, strict=True)))
    found = crossing(of)
    assert found is not None
    assert found.speedup_now < 0.7


def test_layers_that_win_with_many_tokens_are_not_too_small() -> None:
    of = facts(
        *(
            linear(name, 4096, n, requires_grad=False)
            for name, n in (("q", 4096), ("k", 1024), ("v", 1024), ("up", 8192))
        ),
        tokens=2048,
        gpu="H100",
    )
    assert set(losing(of)) == {"k", "v"}
    assert crossing(of) is None
    assert losing_body(of) == {}


@pytest.mark.parametrize("tokens", [35, 40])
def test_where_no_tokens_are_enough_for_the_step_all_that_lose_are_named(tokens: int) -> None:
    """Lightning's example for Fabric: 35 rows, and a model that never gains 3 %."""
    layers = [
        *(linear(f"attention.{i}", 1024, 1024) for i in range(3)),
        linear("linear1", 1024, 4096),
        linear("linear2", 4096, 1024),
    ]
    of = facts(*layers, tokens=tokens, gpu="H100")
    assert crossing(of) is None
    assert set(losing_body(of)) == {each.name for each in layers}


def test_where_fp8_begins_to_pay() -> None:
    found = crossing(facts(linear("up", 4096, 4096), tokens=256))
    assert found is not None
    assert found.speedup_now < 0.8 < 1 < found.speedup_then
    assert 1024 <= found.tokens <= 4096
    assert to_keep(facts(linear("up", 4096, 4096), tokens=256)) == ()


@pytest.mark.parametrize(
    "of",
    [
        facts(linear("up", 4096, 4096)),
        facts(NARROW, tokens=256),
        facts(linear("up", 4096, 4096), tokens=256, source="made up"),
        Facts(network=Network(linears=())),
    ],
    ids=["enough tokens", "too narrow for any", "made up", "no layers"],
)
def test_where_no_number_of_tokens_is_to_be_named(of: Facts) -> None:
    assert crossing(of) is None


@pytest.mark.parametrize("gpu", ["H100", "H200", "L40S"])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("tokens", [256, 512, 1024, 2048])
def test_even_is_not_yet_paying(tokens: int, recipe: str, gpu: str) -> None:
    found = crossing(
        facts(
            *(linear(f"{i}", k, n, recipe=recipe) for i, (k, n) in enumerate(LLAMA_8B)),
            tokens=tokens,
            gpu=gpu,
        )
    )
    assert found is None or found.speedup_then >= 1 + EVEN


def test_timed_shapes_say_that_tokens_are_too_few() -> None:
    of = facts(
        linear("up", 4096, 4096), tokens=256, trial=timed(shape("up", bf16=0.030, fp8=0.025, casts=0.030))
    )
    found = crossing(of)
    assert found is not None
    assert (found.measured, found.gpu) == (True, "NVIDIA H200")


def test_what_was_timed_on_one_gpu_is_modelled_on_none_without_fp8() -> None:
    of = facts(
        linear("up", 4096, 4096),
        tokens=256,
        gpu="A100",
        trial=timed(shape("up", bf16=0.1, fp8=0.2, casts=0.1)),
    )
    assert crossing(of) is None
    assert list(losing(of)) == ["up"]
