"""Looking changes nothing and imports nothing. What a process keeps is held after each test (conftest)."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn

from fp8doctor.examine import examine
from fp8doctor.facts import Facts, Target, Workload
from fp8doctor.loading.job import Job
from research.reliability.everything import differences, everything, settings
from tests.examine.models import llama

TOKENS = torch.zeros(2, 8, dtype=torch.long)


def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Everything that looking must leave alone."""
    return {**everything(model, optimizer), **settings(), "imported": sorted(sys.modules)}


@pytest.mark.slow
def test_looking_changes_nothing() -> None:
    model = llama(tie_word_embeddings=True)
    model.activation_checkpointing_enable()
    model.model.layers[0].compile(backend="eager")
    model.model.layers[1].mlp.register_forward_hook(lambda module, arguments, output: None)
    model.lm_head.eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(TOKENS, labels=TOKENS).loss.backward()
    optimizer.step()
    job = Job(model=model, target=Target(), workload=Workload(), optimizer=optimizer)
    surroundings = Facts(gaps={})
    examine(job, surroundings)
    before = state(model, optimizer)
    examine(job, surroundings)
    assert differences(before, state(model, optimizer)) == []


PROGRAM = """
import sys, torch
from fp8doctor.examine import examine
from fp8doctor.facts import Facts, Target, Workload
from fp8doctor.loading.job import Job
before = set(sys.modules)
model = torch.nn.Sequential(torch.nn.Linear(8, 8))
examine(Job(model=model, target=Target(), workload=Workload()), Facts(gaps={}))
gained = {name.partition(".")[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)
print(sorted(gained), "torch._dynamo" in sys.modules, torch.cuda.is_initialized())
"""


@pytest.mark.slow
def test_looking_imports_no_library() -> None:
    command = [sys.executable, "-c", PROGRAM]
    answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    assert answer.stdout.strip() == "['fp8doctor'] False False"
