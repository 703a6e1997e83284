"""Looking changes nothing and imports nothing."""

from __future__ import annotations

import random
import subprocess
import sys
import textwrap
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


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Everything that looking must leave alone."""
    modules = {}
    for name, module in model.named_modules():
        state = {key: id(value) for key, value in vars(module).items()}
        hooks = {
            key: list(value)
            for key, value in vars(module).items()
            if key.endswith("_hooks") and isinstance(value, dict)
        }
        modules[name] = (
            id(type(module)),
            module.training,
            state,
            hooks,
            id(vars(module).get("_compiled_call_impl")),
        )
    tensors = {
        name: (
            id(each),
            each.data_ptr(),
            each._version,
            each.requires_grad,
            each.detach().sum().item(),
            None if each.grad is None else each.grad.sum().item(),
        )
        for name, each in [*model.named_parameters(), *model.named_buffers()]
    }
    return {
        "modules": modules,
        "tensors": tensors,
        "optimizer": str(optimizer.state_dict()),
        "torch": torch.get_rng_state().tolist(),
        "python": random.getstate(),
        "numpy": str(numpy.random.get_state()),
        "settings": (
            torch.get_default_dtype(),
            torch.is_grad_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.is_autocast_enabled("cuda"),
        ),
        "dynamo": (
            str(torch._dynamo.utils.counters),
            torch._dynamo.config.disable,
            torch._dynamo.eval_frame._stance.stance,
        ),
        "cuda": torch.cuda.is_initialized(),
        "path": list(sys.path),
        "imported": sorted(sys.modules),
    }


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


@pytest.mark.slow
def test_looking_imports_no_library() -> None:
    program = """
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
    answer = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    assert answer.stdout.strip() == "['fp8doctor'] False False"
