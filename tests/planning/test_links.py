"""What parallelism adds to a step, and what it saves."""

import pytest

from fp8doctor.cost.step_cost import in_bf16
from fp8doctor.gpus import gpu_spec
from fp8doctor.planned import facts_of
from fp8doctor.planning.estimates import rows
from fp8doctor.planning.form import experts_ms, weights_cast
from fp8doctor.planning.job_options import Options, share_of
from fp8doctor.recipes import RECIPES
from tests.configurations import LLAMA_8B

TENSORWISE, DELAYED = RECIPES["torchao", "tensorwise"], RECIPES["transformer_engine", "delayed"]


def test_weights_are_cast_once_where_they_are_kept_or_gathered() -> None:
    assert weights_cast(TENSORWISE, Options(accumulate=4)) == 1
    assert weights_cast(TENSORWISE, Options(accumulate=4, dp=8)) == 1 / 8
    assert weights_cast(TENSORWISE, Options(accumulate=4, dp=8, sharding="ddp")) == 1
    assert weights_cast(DELAYED, Options(accumulate=4)) == 1 / 4


def test_each_recipe_stands_beside_bf16_of_its_framework() -> None:
    facts = facts_of(LLAMA_8B, None, None)
    found = rows(facts, ["H100"], Options(tp=8))
    bf16 = {
        stack: {each.bf16_step_ms for each in found if each.stack == stack} for stack in ("torchao", "te")
    }
    assert all(len(times) == 1 for times in bf16.values())
    assert max(bf16["te"]) < min(bf16["torchao"])


def test_tokens_leave_a_host_through_one_adapter_and_stay_on_it_for_its_links() -> None:
    """Ranks of tensor parallelism exchange their part of the tokens."""
    facts = facts_of({"model_type": "qwen3_moe", "num_hidden_layers": 2}, None, None)
    times = {}
    for ep, tp in ((8, 1), (16, 1), (8, 2)):
        options = Options(dp=16, tp=tp, ep=ep)
        times[ep, tp] = experts_ms(share_of(in_bf16(facts), options), options, gpu_spec("H100"))
    assert times[16, 1] / times[8, 1] == pytest.approx((8 / 16 / 50) / (7 / 8 / 450))
    assert times[8, 2] / times[16, 1] == pytest.approx(1 / 2)
