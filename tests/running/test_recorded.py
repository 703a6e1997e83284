"""Scripts that ran under ``fp8doctor run`` on GPUs replay to what each has to be told."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from fp8doctor import load_report
from tests import recordings

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
    "h200-fsdp2_no_precompute": ("DST001",),
    "h200-foreign_trl": ("ENV001", "MOD001"),
    "h200-unsloth_lora": (),
    "h200-unsloth_load_in_fp8": ("MOD003",),
    "h200-trainer_fp8_ao": ("CMP001", "DST001", "MOD007", "STP001"),
    "h200-trainer_fp8_te": (),
    "h200-trainer_overridden_ao": (),
    "h200-trainer_overridden_te": ("ENV001",),
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
    "h200x2-fsdp2_bf16_all_gather": ("DST001", "DST004"),
    "h200x2-fsdp2_few_rows": ("SHP003",),
    "h200x2-fsdp2_without_precompute": ("DST001", "DST004", "STP001"),
}
"""Codes of the warnings and errors, by recording; none of a job that is as it should be."""


replayed = functools.cache(load_report)


@pytest.mark.slow
def test_the_table_of_the_recordings_is_what_they_say() -> None:
    written = (RECORDED / "README.md").read_text("utf-8").splitlines()
    assert recordings.page(RECORDED).splitlines() == written, "python -m tests.recordings writes it again"


NOTHING_TO_PRESCRIBE = ("h200-unsloth_load_in_fp8",)
"""Its weights are stored in FP8 to save memory: no line makes that FP8 training."""


@pytest.mark.parametrize("name", TOLD)
def test_a_recording_is_told_what_it_has_to_be(name: str) -> None:
    report = replayed(RECORDED / f"{name}.json.gz")
    grave = sorted({finding.code for finding in report.findings if finding.severity != "info"})
    assert tuple(grave) == TOLD[name]
    assert not [outcome for outcome in report.outcomes if outcome.outcome == "crashed"]
    assert bool(report.prescription) == (bool(grave) and name not in NOTHING_TO_PRESCRIBE)
