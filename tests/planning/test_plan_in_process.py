"""`fp8doctor.plan` in the user's process, and the JSON that it gives."""

import json
import subprocess
import sys
from typing import Any

import jsonschema
import pytest

import fp8doctor
from research.benchmarks.recorded_steps import PATIENTS
from tests.configurations import LLAMA_8B
from tests.schema import PLAN, text
from tests.waiting import LONGEST_S

SCHEMA = json.loads(PLAN.read_text("utf-8"))

QUIET = """
import logging, warnings
warnings.filterwarnings("error", "mine")
logging.disable(logging.DEBUG)
before = list(warnings.filters), list(logging.root.handlers), logging.root.level
import fp8doctor
fp8doctor.plan({"model_type": "llama", "num_hidden_layers": 2}, "H100")
assert (list(warnings.filters), list(logging.root.handlers), logging.root.level) == before
assert logging.root.manager.disable == logging.DEBUG
"""


@pytest.mark.slow
def test_it_prints_nothing_and_leaves_warnings_and_logging_as_they_were() -> None:
    done = subprocess.run(
        [sys.executable, "-c", QUIET], capture_output=True, text=True, check=False, timeout=LONGEST_S
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (LLAMA_8B, {"gpus": "H100,RTX5090", "dp": 8, "checkpointing": "full"}),
        (LLAMA_8B, {"lora": 16, "lora_modules": ("q_proj",), "step_ms": 800}),
        ({"model_type": "qwen3_moe", "num_hidden_layers": 2}, {"gpus": "A100,B200"}),
        (str(PATIENTS / "h200-llama_8b_float8.json.gz"), {"gpus": "H200"}),
    ],
)
def test_plans_are_as_the_schema_says(config: Any, options: dict[str, Any]) -> None:
    assert text(PLAN) == PLAN.read_text("utf-8"), "python -m tests.refresh schema"
    data = json.loads(fp8doctor.plan(config, **options).to_json())
    jsonschema.validate(data, SCHEMA)
    assert data.keys() == SCHEMA["$defs"]["PlanDocument"]["properties"].keys()
    assert all(row.keys() == SCHEMA["$defs"]["Row"]["properties"].keys() for row in data["rows"])
    data["rows"][0]["basis"] = "guessed"
    with pytest.raises(jsonschema.ValidationError, match="guessed"):
        jsonschema.validate(data, SCHEMA)
