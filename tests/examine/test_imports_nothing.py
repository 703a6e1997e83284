"""Looking imports nothing. That it changes nothing is for tests/test_api.py and tests/test_no_harm.py."""

import subprocess
import sys

import pytest

PROGRAM = """
import sys, torch
from fp8doctor.examine import examine
from fp8doctor.facts import Target, Workload
from fp8doctor.loading.job import Job
before = set(sys.modules)
model = torch.nn.Sequential(torch.nn.Linear(8, 8))
examine(Job(model=model, target=Target(), workload=Workload()))
gained = {name.partition(".")[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)
print(sorted(gained), "torch._dynamo" in sys.modules, torch.cuda.is_initialized())
"""


@pytest.mark.slow
def test_looking_imports_no_library() -> None:
    command = [sys.executable, "-c", PROGRAM]
    answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    assert answer.stdout.strip() == "['fp8doctor'] False False"
