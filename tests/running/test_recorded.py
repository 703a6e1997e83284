"""Scripts that ran under ``fp8doctor run`` on GPUs replay to what each has to be told."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from statistics import median

import pytest

from fp8doctor import load_report
from fp8doctor.facts import recorded
from fp8doctor.profiling.kernel_families import classify
from tests import recordings
from tests.recordings import files, name_of, text_of
from tests.render.every_format import hold_every_format

RECORDED = Path(__file__).parent / "recorded"

TOLD: dict[str, tuple[str, ...]] = {
    "h200-plain": (),
    "h200-plain_small": ("SHP002", "STP001"),
    "h200-te": (),
    "h200-te_checkpointed": ("CKP002",),
    "h200-lora": (),
    "h200-lora_adapters_too": ("SHP002",),
    "h200-lora_eager": ("CMP001",),
    "h200-fsdp2": (),
    "h200-trainer": (),
    "h200-trainer_eager": ("CMP001",),
    "h200-trainer_overridden": ("ENV001", "MOD001"),
    "h200-te_loop_stopped": ("ENV006", "STP007"),
    "h200-eager_loop_timed_at_end": ("CMP001", "ENV006", "MEM001"),
    "h200-te_overridden": ("ENV001", "MOD001"),
    "h200-fsdp2_bf16_all_gather": (),
    "h200-fsdp2_no_precompute": ("DST002",),
    "h200-foreign_trl": ("ENV001", "MOD001"),
    "h200-unsloth_lora": (),
    "h200-unsloth_load_in_fp8": ("MOD003",),
    "h200-trainer_fp8_ao": ("CMP001", "DST001", "MOD007", "MOD010", "STP001"),
    "h200-trainer_fp8_te": (),
    "h200-trainer_overridden_ao": (),
    "h200-trainer_overridden_te": ("MOD006",),
    "h200x2-ddp_torchao": (),
    "h200x2-ddp_torchao_compiled_whole": (),
    "h200x2-ddp_torchao_eager": ("CMP001", "STP007"),
    "h200x2-ddp_te_delayed": ("STP007",),
    "h200x2-ddp_te_delayed_own_amax": ("STP007",),
    "h200x2-ddp_slow_rank": ("DST004",),
    "h200x2-ddp_uneven_steps": ("STP007",),
    "h200x2-ddp_rank_raises": ("CMP001", "STP007"),
    "h200x2-ddp_rank_killed": ("CMP001", "STP007"),
    "h200x2-fsdp1_torchao": ("CMP001",),
    "h200x2-fsdp2_float8_all_gather": (),
    "h200x2-fsdp2_bf16_all_gather": ("DST001", "DST005"),
    "h200x2-fsdp2_few_rows": ("SHP003",),
    "h200x2-fsdp2_without_precompute": ("DST002", "DST005", "STP001"),
}
"""Codes of the warnings and errors, by recording; none of a job that is as it should be."""

INFOS = {
    "h200-fsdp2_bf16_all_gather": "DST001",
    "h200x2-ddp_te_delayed": "DST003",
}
"""What is told without a warning: one GPU exchanges nothing, and an amax reduced costs little."""

replayed = functools.cache(load_report)


def test_every_recording_is_held() -> None:
    assert set(map(name_of, files(RECORDED))) == set(TOLD)


@pytest.mark.slow
def test_the_table_of_the_recordings_is_what_they_say() -> None:
    written = (RECORDED / "README.md").read_text("utf-8").splitlines()
    assert recordings.page(RECORDED).splitlines() == written, "python -m tests.recordings writes it again"


NOTHING_TO_PRESCRIBE = ("h200-unsloth_load_in_fp8",)
"""Its weights are stored in FP8 to save memory: no line makes that FP8 training."""


@pytest.mark.parametrize("name", TOLD)
def test_a_recording_is_told_what_it_has_to_be(name: str) -> None:
    report = replayed(RECORDED / f"{name}.json.gz")
    grave = sorted(finding.code for finding in report.findings if finding.severity != "info")
    assert tuple(grave) == TOLD[name]
    assert not [outcome for outcome in report.outcomes if outcome.outcome == "crashed"]
    assert bool(report.prescription) == (bool(grave) and name not in NOTHING_TO_PRESCRIBE)


@pytest.mark.gate(
    "h200-plain", "h200-te_checkpointed", "h200-lora_eager", "h200x2-ddp_rank_killed", "h200x2-fsdp2_few_rows"
)
@pytest.mark.slow
@pytest.mark.parametrize("name", TOLD)
def test_a_recording_is_sound_in_every_format(name: str) -> None:
    hold_every_format(replayed(RECORDED / f"{name}.json.gz"))


WITHOUT_FP8 = "h200-unsloth_lora"

PROFILED = [
    name
    for name in TOLD
    if "breakdown" in (json.loads(text_of(RECORDED / f"{name}.json.gz"))["facts"].get("observed", ()))
    and "ENV001" not in TOLD[name]
    and name != WITHOUT_FP8
]
"""Jobs in which FP8 is engaged. The collection replays none."""


def test_most_are_profiled() -> None:
    assert len(PROFILED) == 27


@pytest.mark.parametrize(("name", "code"), INFOS.items())
def test_what_costs_little_is_told_without_a_warning(name: str, code: str) -> None:
    report = replayed(RECORDED / f"{name}.json.gz")
    assert code in [finding.code for finding in report.findings if finding.severity == "info"]


@pytest.mark.parametrize("name", PROFILED)
def test_the_profiled_step_is_the_gpus(name: str) -> None:
    seen = replayed(RECORDED / f"{name}.json.gz").facts.observed
    families = seen.breakdown.families_ms
    assert seen.clock == "cuda"
    assert seen.fp8_gemms > 0
    assert families["gemm_fp8"] > 0
    assert sum(families.values()) + seen.breakdown.idle_ms == pytest.approx(median(seen.steps_ms), rel=0.01)


@pytest.mark.parametrize("name", [*PROFILED, WITHOUT_FP8])
def test_a_kernel_that_no_rule_knew_is_known_now(name: str) -> None:
    breakdown = replayed(RECORDED / f"{name}.json.gz").facts.observed.breakdown
    unknown = [group for group in breakdown.groups if group.family == "unknown"]
    assert sum(group.time_ms for group in unknown) == pytest.approx(breakdown.families_ms.get("unknown", 0.0))
    assert "unknown" not in [classify(group.name, group.operator) for group in unknown]


@pytest.mark.parametrize("name", [name for name in TOLD if "x2" in name])
def test_both_ranks_are_told_of(name: str) -> None:
    facts = replayed(RECORDED / f"{name}.json.gz").facts
    assert recorded(facts, "ranks")
    assert [rank.rank for rank in facts.ranks.processes] == [0, 1]
