"""Plans of public architectures, built on the meta device."""

from __future__ import annotations

import pytest

import fp8doctor

LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}


def test_a_plan_has_a_row_for_each_recipe_and_gpu() -> None:
    found = fp8doctor.plan(LLAMA_8B, ["H100", "B200"], batch=1, seq=4096)
    rows = {(each.gpu, each.recipe): each for each in found.rows if each.compiled and each.stack == "torchao"}
    tensorwise = rows["H100", "tensorwise"]
    assert tensorwise.speedup == pytest.approx(tensorwise.bf16_step_ms / tensorwise.step_ms)
    assert tensorwise.speedup_low < tensorwise.speedup < tensorwise.speedup_high
    assert tensorwise.fits
    assert rows["B200", "mxfp8"].step_ms is not None
    assert rows["H100", "mxfp8"].why == "mxfp8 does not run on H100"
    assert found.to_dict()["rows"][0]["basis"] == "modelled"
