"""CKP001 on real models; a CPU has no peak, so memory and times are those of a GPU."""

from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

from fp8doctor.diagnosis.treatments import checkpointing_off
from fp8doctor.facts import Facts, Gpu
from tests.checks.arms import ran, timed
from tests.checks.rules import Look, finding_of, found_by, outcome_of
from tests.examine.models import StoredLinear, llama

pytestmark = pytest.mark.slow

NEEDLESS = "checkpointing-not-needed"
H100 = Gpu(name="NVIDIA H100", memory_gib=79.6, memory_used_gib=0.4, visible=True, other_processes=0)


def checkpointed_llama() -> nn.Module:
    model = llama(use_cache=True).train()
    model.gradient_checkpointing_enable()
    return model


def on_gpu(facts: Facts, *, peak_gib: float | None = 17.2, gpu: Gpu = H100) -> Facts:
    off = ran("checkpointing-off", 88.3, base="as_is", peak_gib=peak_gib)
    return timed(replace(facts, gpus=(gpu,)), ran("as_is", 105.4, peak_gib=7.4), off)


def test_the_printed_lines_make_it_silent_and_keep_the_cache_off(look: Look) -> None:
    model = checkpointed_llama()
    finding = found_by(NEEDLESS, on_gpu(look(model)))
    assert finding.evidence["free_gib"] == 79.6
    exec(finding.treatment.code, {"model": model})
    after = look(model)
    assert outcome_of(NEEDLESS, on_gpu(after)) == "not_applicable"
    assert after.training.use_cache is False


@pytest.mark.parametrize(
    "changes",
    [
        {"peak_gib": 77.0},
        {"gpu": replace(H100, memory_used_gib=65.0, other_processes=1)},
        {"gpu": replace(H100, memory_gib=15.9)},
    ],
    ids=["too tight", "others use the GPU", "a small GPU"],
)
def test_checkpointing_that_is_needed(changes: dict[str, Any], look: Look) -> None:
    assert outcome_of(NEEDLESS, on_gpu(look(checkpointed_llama()), **changes)) == "silent"


def test_what_is_not_known_decides_nothing(look: Look) -> None:
    facts = look(checkpointed_llama())
    as_is, _ = on_gpu(facts).trial.arms
    without = (on_gpu(look(model)) for model in (llama().train(), checkpointed_llama().eval()))
    for unknown in (on_gpu(facts, peak_gib=None), timed(facts, as_is), *without):
        assert outcome_of(NEEDLESS, unknown) == "not_applicable"


@pytest.mark.parametrize(
    ("tokens", "fix"), [(2**12, "checkpointing-off"), (2**17, "checkpoint-fewer-blocks"), (2**20, None)]
)
def test_without_a_gpu_the_estimate_decides_how_many_blocks_are_checkpointed(
    tokens: int, fix: str | None, look: Look
) -> None:
    with torch.device("meta"):
        blocks = [nn.Sequential(StoredLinear(4096, 4096), StoredLinear(4096, 4096)) for _ in range(32)]
        model = nn.Sequential(*map(checkpoint_wrapper, blocks))
        rows = torch.randn(tokens, 4096, dtype=torch.bfloat16)
    facts = look(model, tokens=tokens, batch=(rows,))
    some = replace(facts.network, trainable_parameters=1)  # of adapters: without any nothing is kept
    finding = finding_of(NEEDLESS, replace(facts, network=some, assumed_gpu="H100"))
    assert (finding and finding.treatment and finding.treatment.name) == fix


class Flagged(nn.Module):
    """A model that is none of transformers, with the flag of its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))
        self.gradient_checkpointing = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.gradient_checkpointing else block(x)
        return x


def test_the_lines_clear_a_flag_without_methods_of_transformers(look: Look) -> None:
    model = Flagged()
    exec(checkpointing_off(look(model)).code, {"model": model})
    assert not model.gradient_checkpointing
