"""What is expected of a step that nobody timed, held to trials of the same jobs on an H200."""

from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from fp8doctor import load_report
from fp8doctor.analysis.modelled_speedup import modelled_speedup
from fp8doctor.analysis.trial_view import TrialView
from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.diagnosis.estimate import Expected
from fp8doctor.facts import Facts
from fp8doctor.finding import Finding
from fp8doctor.registry import discover, run
from research.benchmarks import recorded_steps
from tests.checks.distributed.sharded import blocks, processes
from tests.checks.models import float8
from tests.checks.rules import Look

RECORDED = Path(__file__).parents[1] / "patients" / "recorded"


def examined(name: str) -> tuple[Facts, tuple[Finding, ...]]:
    facts = load_report(RECORDED / f"h200-{name}.json.gz").facts
    return facts, run(discover(), facts)[0]


@pytest.mark.parametrize("name", ["hidden_te", "nf4_base"])
def test_nothing_is_expected_of_layers_that_the_fix_changes(name: str) -> None:
    assert Expected(*examined(name)).now is None


def test_what_is_not_what_it_seems_is_expected_once_it_is_fixed() -> None:
    verdict = diagnose(recorded_steps.without_trial(examined("llama_kv_cache")[0])).verdict
    assert verdict.estimated_speedup is None
    assert verdict.achievable_speedup is not None


def test_a_forward_that_recomputes_layers_that_nobody_saw_is_taken_to_recompute_all() -> None:
    facts = load_report(RECORDED / "h200-te_own_checkpoint.json.gz").facts
    untimed = recorded_steps.without_trial(facts)
    expects = modelled_speedup(untimed)
    assert expects is not None
    assert expects.now is not None
    assert expects.now.value == pytest.approx(TrialView(facts).speedup.value, rel=0.05)


def test_fp32_weights_that_fsdp2_gathers_in_bf16_multiply_as_bf16_ones_do(look: Look) -> None:
    policy, found = MixedPrecisionPolicy(param_dtype=torch.bfloat16), []
    with processes(1):
        for dtype in (torch.float32, torch.bfloat16):
            model = float8(blocks()).to(dtype)
            fully_shard(model, mp_policy=policy)
            found.append(modelled_speedup(look(model, tokens=4096)))
    kept, gathered = found
    assert kept is not None
    assert gathered is not None
    assert kept.parts_ms == gathered.parts_ms
    assert kept.bf16.families_ms | {"optimizer": 0.0} == gathered.bf16.families_ms | {"optimizer": 0.0}


def test_without_a_batch_the_batch_is_what_is_missing(look: Look) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4096, 4096)).bfloat16()
    facts = replace(look(model), assumed_gpu="H100")
    assert Expected(facts, ()).why_not == "there is no batch to run the model on"


def test_what_is_no_training_in_16_or_32_bits_has_no_estimate(look: Look) -> None:
    frozen, wide = (torch.nn.Sequential(torch.nn.Linear(4096, 4096)).bfloat16() for _ in range(2))
    frozen.requires_grad_(False)
    for model in (frozen, wide.double()):
        assert modelled_speedup(replace(look(model, tokens=4096), assumed_gpu="H100")) is None
