"""``fp8doctor why``: a layer by its name or a part of it, out of recorded reports."""

import json
from pathlib import Path

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


def test_a_part_of_a_name_means_the_only_layer_that_has_it() -> None:
    assert "blocks.0.mlp.down" in told("0.mlp.down", "h200-decoder_454m")
    refused = why("mlp.down", "h200-decoder_454m")
    assert refused.exit_code == 2
    assert "blocks.1.mlp.down" in refused.stderr


def test_json_of_one_layer() -> None:
    data = json.loads(why("blocks.0.mlp.down", "h200-decoder_454m", "--format", "json").stdout)
    assert (data["schema_version"], data["kind"], data["seen"]["name"]) == (
        SCHEMA_VERSION,
        "layer",
        "blocks.0.mlp.down",
    )
    assert (data["rows"], data["keep_in_bf16"], data["gain_ms"] is None) == (16384, False, False)
