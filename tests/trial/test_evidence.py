"""What Dynamo did to an arm, in words: graph breaks, recompilations, and functions that were given up."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch._dynamo import utils
from transformers import LlamaConfig, LlamaForCausalLM

from fp8doctor.facts import ArmCut, Target, Workload
from fp8doctor.facts.unrecorded import NOT_RECORDED
from fp8doctor.loading.job import Job
from fp8doctor.trial.conductor import conduct
from fp8doctor.trial.measure import timer
from fp8doctor.trial.measure.budget import Budget
from fp8doctor.trial.measure.evidence import compilations
from fp8doctor.trial.measure.trial_run import TrialRun
from fp8doctor.trial.planning import as_it_is
from fp8doctor.trial.variant import VariantPlan

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timer, "MOST_ROUNDS", timer.LEAST_ROUNDS)


def tried(model: nn.Module, batch: object, step: Callable[..., torch.Tensor] | None = None) -> ArmCut:
    """What the trial records of the model as it is."""
    job = Job(model=model, target=Target(), workload=Workload(accumulate=1), batch=batch, training_step=step)
    (arm,) = conduct(
        job,
        [],
        [VariantPlan("as_is", as_it_is)],
        TrialRun(torch.device("cpu"), Budget(30)),
    ).arms
    assert arm.cuts[0].alloc_retries is None
    return arm.cuts[0]


class Talking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        print("forward")
        if x.sum().item() > 0:
            x = x + 1
        return x


def test_a_print_and_a_branch_on_data_are_named_with_their_explanation() -> None:
    model = Talking()
    model.compile(backend="aot_eager")
    seen = tried(model, torch.ones(2, 8))
    assert seen.graph_breaks == len(seen.break_reasons) == 2
    by_print, by_branch = seen.break_reasons
    assert "`print`" in by_print
    assert "item()" in by_branch
    assert not any("self.linear" in reason or "\n" in reason for reason in seen.break_reasons)
    assert (seen.recompilations, seen.recompile_reasons, seen.left_eager) == (0, (), ())


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x))


def test_a_clean_model_compiles_once() -> None:
    model = Plain()
    model.compile(backend="aot_eager")
    seen = tried(model, torch.ones(2, 8))
    assert (seen.graph_breaks, seen.break_reasons) == (0, ())
    assert (seen.recompilations, seen.recompile_reasons, seen.left_eager) == (0, (), ())


def test_varying_shapes_reach_the_limit_and_the_function_is_named() -> None:
    model, lengths = Plain(), iter(range(2, 10_000))
    model.compile(backend="aot_eager", dynamic=False)
    seen = tried(model, torch.ones(2, 8), lambda model, batch: model(torch.ones(next(lengths), 8)).sum())
    assert seen.left_eager == ("Plain.forward",)
    assert seen.recompilations == torch._dynamo.config.recompile_limit - 1
    assert any("size mismatch" in reason for reason in seen.recompile_reasons)
    assert len(seen.recompile_reasons) <= 5
    assert not any("self.linear" in reason for reason in seen.recompile_reasons)


@torch._dynamo.config.patch(recompile_limit=2)
def test_a_kv_cache_that_is_left_on_makes_compiled_blocks_give_up() -> None:
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=32,
    )
    model = LlamaForCausalLM(config).train()
    for layer in model.model.layers:
        layer.compile(backend="eager")
    tokens = torch.randint(0, 32, (1, 8))
    seen = tried(model, {"input_ids": tokens, "labels": tokens, "use_cache": True})
    assert "LlamaDecoderLayer.forward" in seen.left_eager
    assert seen.recompile_reasons
    without = tried(model, {"input_ids": tokens, "labels": tokens, "use_cache": False})
    assert (without.left_eager, without.recompilations) == ((), 0)


def test_the_users_list_of_compilations_is_left_alone() -> None:
    model = Plain()
    model.compile(backend="aot_eager")
    before, length = utils._compilation_metrics, len(utils._compilation_metrics)
    with compilations(model) as seen:
        model(torch.ones(2, 8))
    assert seen.graphs == 1
    assert utils._compilation_metrics is before
    assert len(utils._compilation_metrics) == length


def test_what_this_torch_keeps_elsewhere_is_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Plain()
    model.compile(backend="aot_eager")
    monkeypatch.delattr(utils, "_compilation_metrics")
    with compilations(model) as seen:
        pass
    assert seen.recompilations is NOT_RECORDED
    assert seen.left_eager is NOT_RECORDED
    assert seen.breaks == 0
