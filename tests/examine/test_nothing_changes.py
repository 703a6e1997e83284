"""Looking changes nothing and imports nothing. What a process keeps is held after each test (conftest)."""

from __future__ import annotations

import random
import subprocess
import sys
from typing import Any

import numpy
import pytest
import torch
import torch._dynamo
from torch import nn

from fp8doctor.examine import examine
from fp8doctor.facts import Facts, Target, Workload
from fp8doctor.loading.job import Job
from tests.examine.models import llama

TOKENS = torch.zeros(2, 8, dtype=torch.long)


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """Everything that looking must leave alone."""
    modules = [
        (id(type(module)), {key: id(value) for key, value in vars(module).items()}, module.training)
        for module in model.modules()
    ]
    hooks = [
        list(value)
        for module in model.modules()
        for key, value in vars(module).items()
        if key.endswith("_hooks") and isinstance(value, dict)
    ]
    tensors = [
        (id(each), each.data_ptr(), each._version, each.requires_grad, each.detach().sum().item(), each.grad)
        for each in (*model.parameters(), *model.buffers())
    ]
    numbers = torch.get_rng_state().tolist(), random.getstate(), str(numpy.random.get_state())
    dynamo = str(torch._dynamo.utils.counters), torch._dynamo.eval_frame._stance.stance
    state = str(optimizer.state_dict()), torch.is_grad_enabled(), torch.cuda.is_initialized()
    return [modules, hooks, str(tensors), numbers, dynamo, state, list(sys.path), sorted(sys.modules)]


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
    before = digest(model, optimizer)
    examine(job, surroundings)
    assert digest(model, optimizer) == before


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
