"""The examples under the observer, as they should be and as people misconfigure them: all that is told."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.facts import Facts
from tests.programs import printed
from tests.running.forks import BECOME, IMPORTED

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"

OF_THIS_MACHINE = ("SHP002", "SHP003", "STP")
"""What is rightly said of a model that a CPU trains in a second, of a CPU, and of how busy it is."""

OF_ANY_MACHINE = ("LORA003",)
"""Former codes of what is told as SHP002 too, but not of how small the model is."""

PROGRAM = """
torch.backends.mkldnn.set_flags(False)  # `_fp8_gemms_past_onednn` of tests/conftest.py
torch._TorchCompileInductorWrapper.__call__ = lambda self, graph, inputs, **_: graph  # as captured
heard = []
settings = WatchOptions("train.py", 3, 2, stop=False, budget_s=None, device=None)
observer = ScriptObserver(heard.append, settings)
observer.install()
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
observer.closed()
facts = [each.facts for each in heard if each.facts is not None][-1]
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


def told(command: str, folder: Path, **variables: str) -> list[str]:
    """Codes of all findings of an example, in the order of the areas, those under a shared code last."""
    script, *arguments = command.split()
    arguments += ["--steps", "9"]
    if script in ("trainer.py", "sft.py"):
        arguments += ["--folder", str(folder)]
    lines = printed(IMPORTED + BECOME + PROGRAM, str(EXAMPLES / script), *arguments, **variables)
    facts = Facts.from_dict(json.loads(lines.splitlines()[-1]))
    assert len(facts.observed.steps_ms) == 3
    assert facts.workload.batch_source == "given"
    found = (diagnose(facts, ignore=OF_THIS_MACHINE), diagnose(facts, select=OF_ANY_MACHINE))
    return [each.code for document in found for each in document.findings]


@pytest.mark.parametrize(
    ("command", "variables", "codes"),
    [
        ("plain_loop.py --layers 2", {}, []),
        ("trainer.py --float8 --layers 1", {}, []),
        ("lora.py --layers 1", {}, []),
        ("fsdp2.py --layers 2", {}, []),
        pytest.param("sft.py --float8 --layers 1", {}, [], marks=needs_trl),
        ("plain_loop.py --no-compile", {}, ["CMP001"]),
        ("trainer.py", FP8, ["ENV001", "MOD001"]),
        ("lora.py --adapters-too --no-compile --layers 1", {}, ["CMP001", "SHP002"]),
        ("fsdp2.py --bf16-all-gather --no-compile", {}, ["CMP001", "DST001"]),
        ("fsdp2.py --no-precompute --no-compile", {}, ["CMP001", "DST001"]),
        pytest.param("sft.py", FP8, ["ENV001", "MOD001"], marks=needs_trl),
    ],
)
def test_a_job_is_told_what_is_wrong_with_it(
    command: str, variables: dict[str, str], codes: list[str], tmp_path: Path
) -> None:
    """A healthy one is left alone."""
    assert told(command, tmp_path, **variables) == codes
