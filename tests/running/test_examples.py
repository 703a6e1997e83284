"""The examples under the observer, as they should be and as people misconfigure them: all that is told."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.facts import Facts
from tests.checks.environment.live import printed

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

OF_THIS_MACHINE = ("SHP002", "SHP003", "GPU005", "STP")
"""What is rightly said of a model that a CPU trains in a second, of a CPU, and of how busy it is."""

PROGRAM = """
import gc
import json
import runpy
import sys
import torch
import torch._inductor.codegen.triton
import torchao.float8
import peft
import transformers.models.llama
from transformers import Trainer
from fp8doctor.running.observer import Observer
from fp8doctor.running.settings import Settings

class Heard:
    forked, messages = False, []

    def send(self, message):
        self.messages.append(message)

torch.backends.mkldnn.set_flags(False)  # `_fp8_gemms_past_onednn` of tests/conftest.py
torch._TorchCompileInductorWrapper.__call__ = lambda self, graph, inputs, **_: graph  # as captured
gc.freeze()  # what was imported is no model
heard = Heard()
observer = Observer(heard, Settings("train.py", 3, 2, stop=False, budget_s=None, device=None))
observer.install()
sys.argv = sys.argv[1:]
if sys.argv[0].endswith(".py"):
    runpy.run_path(sys.argv[0], run_name="__main__")
else:
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
observer.closed()
facts = [each.facts for each in heard.messages if hasattr(each, "facts")][-1]
print()
print(json.dumps(facts))
"""
"""What `fp8doctor run` does in the script's process, in a fork that has its imports done."""

FP8 = {"ACCELERATE_MIXED_PRECISION": "fp8"}
"""As ``accelerate launch --mixed_precision fp8`` sets it."""

needs_trl = pytest.mark.skipif(
    importlib.util.find_spec("trl") is None or importlib.util.find_spec("trl.kernels") is not None,
    reason="TRL is not installed, or computes its loss with Triton alone, as from 1.15 on",
)


def seen(*command: str, **variables: str) -> Facts:
    """The last facts of a script or a module."""
    return Facts.from_dict(json.loads(printed(PROGRAM, *command, **variables).splitlines()[-1]))


def told(facts: Facts) -> list[str]:
    """Codes of all findings, in the order of the areas."""
    return [each.code for each in diagnose(facts, ignore=OF_THIS_MACHINE).findings]


def told_of_example(command: str, folder: Path, **variables: str) -> list[str]:
    script, *arguments = command.split()
    arguments += ["--steps", "9"]
    if script in ("trainer.py", "sft.py"):
        arguments += ["--folder", str(folder)]
    facts = seen(str(EXAMPLES / script), *arguments, **variables)
    assert len(facts.observed.steps_ms) == 3
    assert facts.workload.batch_source == "given"
    return told(facts)


@pytest.mark.parametrize(
    "command",
    [
        "plain_loop.py --layers 2",
        "trainer.py --float8 --layers 1",
        "lora.py --layers 1",
        "fsdp2.py --layers 2",
        pytest.param("sft.py --float8 --layers 1", marks=needs_trl),
    ],
)
def test_a_healthy_job_is_left_alone(command: str, tmp_path: Path) -> None:
    assert told_of_example(command, tmp_path) == []


@pytest.mark.parametrize(
    ("command", "variables", "codes"),
    [
        ("plain_loop.py --no-compile", {}, ["CMP001"]),
        ("trainer.py", FP8, ["ENV001", "MOD001"]),
        ("lora.py --adapters-too --no-compile --layers 1", {}, ["CMP001", "LORA003"]),
        ("fsdp2.py --bf16-all-gather --no-compile", {}, ["CMP001", "DST001"]),
        ("fsdp2.py --no-precompute --no-compile", {}, ["CMP001", "DST002"]),
        pytest.param("sft.py", FP8, ["ENV001", "MOD001"], marks=needs_trl),
    ],
)
def test_a_misconfigured_job_is_told_why(
    command: str, variables: dict[str, str], codes: list[str], tmp_path: Path
) -> None:
    assert told_of_example(command, tmp_path, **variables) == codes


def test_a_script_from_accelerates_wheel() -> None:
    module = "accelerate.test_utils.scripts.test_script"
    facts = seen(module, **FP8)
    assert told(facts) == ["MOD001"]
    assert len(facts.observed.steps_ms) == 3
