"""``fp8doctor plan``: what it asks of a worker, and what it prints and writes."""

import json
from pathlib import Path

import pytest

from research.benchmarks.recorded_steps import PATIENTS
from tests.cli.command import Worker, fp8doctor, process
from tests.configurations import LLAMA_8B

SAVED = PATIENTS / "h200-llama_8b_float8.json.gz"


def test_a_worker_examines_what_is_named(worker: Worker) -> None:
    result = fp8doctor("plan", "model.py", "--batch", "4", "--gpu", "h100", "--format", "json")
    assert result.exit_code == 0, result.stderr
    (asked,) = worker.asked
    assert (asked["target"], asked["planned"], asked["batch"]) == ("model.py", True, 4)
    assert {row["gpu"] for row in json.loads(result.stdout)["rows"]} == {"H100"}


def test_a_saved_report_needs_no_worker(worker: Worker) -> None:
    result = fp8doctor("plan", str(SAVED), "--gpu", "h200,b200", "--recipe", "tensorwise")
    assert (result.exit_code, worker.asked) == (0, [])
    assert "On H200 use tensorwise, compiled: 1.21x" in " ".join(result.stdout.split())


def test_a_framework_shows_its_own_lines() -> None:
    shown = fp8doctor("plan", str(SAVED), "--framework", "axolotl").stdout
    assert "fp8: true" in shown
    assert "convert_to_float8_training" not in shown
    words = "--framework trl --recipe delayed --gpu h200".split()
    absent = fp8doctor("plan", str(SAVED), *words).stdout
    assert "trl has no setting for delayed" in absent


@pytest.mark.slow
@pytest.mark.parametrize(
    ("content", "code", "said"),
    [
        (json.dumps(LLAMA_8B), 0, "LlamaForCausalLM, 8.03 B parameters"),
        (json.dumps(LLAMA_8B)[:60], 2, "config.json cannot be read: it is not JSON"),
        ("[1, 2]", 2, "config.json is JSON, but no configuration"),
        (json.dumps({"_class_name": "FluxTransformer2DModel"}), 2, "is of a diffusion model"),
    ],
)
def test_a_configuration_without_a_gpu(tmp_path: Path, content: str, code: int, said: str) -> None:
    (tmp_path / "config.json").write_text(content)
    result = process("plan", str(tmp_path), "--gpu", "H100")
    assert result.returncode == code, result.stderr
    assert said in result.stdout + result.stderr
