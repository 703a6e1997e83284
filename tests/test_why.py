"""``fp8doctor why``: a layer by its name, a part of it or a pattern, out of recorded reports."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from fp8doctor import cli, load_report
from fp8doctor.diagnosis.document import SCHEMA_VERSION

RECORDED = Path(__file__).parent / "patients" / "recorded"


def why(layer: str, patient: str, *options: str) -> Result:
    saved = str(RECORDED / f"{patient}.json.gz")
    return CliRunner().invoke(cli.main, ["why", layer, saved, *options])


def told(layer: str, patient: str) -> str:
    """The page in one line."""
    result = why(layer, patient)
    assert result.exit_code == 0, result.stderr
    return " ".join(result.stdout.split())


def test_a_layer_that_the_plan_keeps_in_bf16() -> None:
    saved = RECORDED / "h100-cast_heavy_layer.json.gz"
    kept = [
        layer
        for step in load_report(saved).prescription
        if step.treatment.name == "keep-in-bf16"
        for layer in step.treatment.layers
    ]
    page = told(kept[0], "h100-cast_heavy_layer")
    assert "the plan keeps this layer in BF16" in page


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layer", "count"),
    [("mlp.down", 24), ("blocks.1", 5), ("blocks.1?.mlp.down", 10), ("*.0.mlp.*", 3), ("down", 24)],
)
def test_a_part_of_a_name_or_a_pattern_means_several(layer: str, count: int) -> None:
    listed = json.loads(why(layer, "h200-decoder_454m", "--format", "json").stdout)["layers"]
    assert len(listed) == count
    assert f"{count} layers named {layer}" in told(layer, "h200-decoder_454m")


def test_json_of_one_layer() -> None:
    data = json.loads(why("blocks.0.mlp.down", "h200-decoder_454m", "--format", "json").stdout)
    assert (data["schema_version"], data["kind"], data["seen"]["name"]) == (
        SCHEMA_VERSION,
        "layer",
        "blocks.0.mlp.down",
    )
    assert (data["rows"], data["keep_in_bf16"], data["gain_ms"] is None) == (16384, False, False)
