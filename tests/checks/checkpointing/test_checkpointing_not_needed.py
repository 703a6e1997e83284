"""CKP001 on real models; a CPU has no peak, so memory and times are those of a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from torch import nn

from fp8doctor import load_report
from fp8doctor.checks.checkpointing.checkpointing_not_needed import checkpointing_not_needed
from fp8doctor.facts import Facts, Gpu
from fp8doctor.finding import NotApplicable
from tests.checks.arms import ran, timed
from tests.examine.models import llama

pytestmark = pytest.mark.slow

RECORDED = Path(__file__).parents[2] / "patients" / "recorded"
Look = Callable[..., Facts]
H100 = Gpu(name="NVIDIA H100", memory_gib=79.6, memory_used_gib=0.4, visible=True, other_processes=0)


def checkpointed_llama() -> nn.Module:
    model = llama(use_cache=True).train()
    model.gradient_checkpointing_enable()
    return model


def on_gpu(
    facts: Facts, *, without_ms: float = 88.3, peak_gib: float | None = 17.2, gpu: Gpu = H100
) -> Facts:
    off = ran("checkpointing-off", without_ms, base="as_is", peak_gib=peak_gib)
    return timed(replace(facts, gpus=(gpu,)), ran("as_is", 105.4, peak_gib=7.4), off)


def test_the_printed_lines_make_it_silent_and_keep_the_cache_off(look: Look) -> None:
    model = checkpointed_llama()
    finding = checkpointing_not_needed(on_gpu(look(model)))
    assert finding.evidence["free_gib"] == 79.6
    exec(finding.treatment.code, {"model": model})
    after = look(model)
    assert isinstance(checkpointing_not_needed(on_gpu(after)), NotApplicable)
    assert after.training.use_cache is False


@pytest.mark.parametrize(
    "changes",
    [
        {"peak_gib": 72.0},
        {"without_ms": 104.0},
        {"gpu": replace(H100, memory_used_gib=65.0, other_processes=1)},
        {"gpu": replace(H100, memory_gib=15.9)},
    ],
    ids=["too tight", "costs nothing", "others use the GPU", "a small GPU"],
)
def test_checkpointing_that_is_needed_or_free(changes: dict[str, Any], look: Look) -> None:
    assert checkpointing_not_needed(on_gpu(look(checkpointed_llama()), **changes)) is None


def test_what_is_not_known_decides_nothing(look: Look) -> None:
    of_need = load_report(RECORDED / "h200-checkpointed_of_need.json.gz").facts
    assert checkpointing_not_needed(of_need) is None, "known not to fit without it"
    facts = look(checkpointed_llama())
    as_is, off = on_gpu(facts).trial.arms
    scattered = replace(off, rounds_ms=(60.0, 70.0, 80.0, 110.0, 120.0, 130.0))
    assert checkpointing_not_needed(timed(on_gpu(facts), as_is, scattered)) is None
    assert isinstance(checkpointing_not_needed(on_gpu(facts, peak_gib=None)), NotApplicable)
    assert isinstance(checkpointing_not_needed(timed(facts, as_is)), NotApplicable)
    for model in (llama().train(), checkpointed_llama().eval()):
        assert isinstance(checkpointing_not_needed(on_gpu(look(model))), NotApplicable)
