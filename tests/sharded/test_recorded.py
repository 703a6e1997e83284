"""Trials of sharded jobs beside plain scripts of the same jobs (research/benchmarks/sharded.py)."""

import functools
from pathlib import Path
from statistics import median

import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from fp8doctor import cli, load_report
from fp8doctor.answer.steps import ranks
from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.facts import NOT_RECORDED
from fp8doctor.render import text
from tests.recordings import files, name_of, text_of

RECORDED = Path(__file__).parent / "recorded"

EXAMPLE = Path(__file__).parents[2] / "examples" / "sharded.md"

replayed = functools.cache(load_report)


def test_a_job_of_deepspeed_is_named_so() -> None:
    found = ranks(replayed(RECORDED / "h200x2-zero2_torchao.json.gz").facts)
    assert found is not None
    assert "ZeRO" in found[0]


BF16_MS = {
    "h100-ddp_torchao": 117.6,
    "h100-ddp_te": 117.6,
    "h100-fsdp1_torchao": 129.7,
    "h100-fsdp2_torchao": 132.4,
    "h100-fsdp2_torchao_wide": 169.0,
    "h100x2-ddp_torchao": 129.9,
    "h200x2-ddp_te": 126.0,
    "h200x2-fsdp2_te": 139.9,
    "h200x2-fsdp2_torchao_8b": 435.2,
    "h200x2-zero2_torchao": 136.3,
    "h200x2b-ddp_te": 125.4,
    "h200x2b-ddp_torchao": 125.4,
    "h200x2b-fsdp2_te": 141.6,
    "h200x2b-fsdp2_torchao": 141.6,
    "h200x2b-fsdp2_torchao_8b": 455.0,
    "h200x2b-zero2_torchao": 135.6,
    "h200x2b-zero3_torchao": 352.2,
}
"""Step of the best BF16 in a plain script, in ms: the mean of all turns' medians."""

GAINS = {
    "h100-ddp_bf16": 117.6 / 105.7,
    "h100-fsdp2_bf16": 132.4 / 145.2,
    "h200x2-fsdp2_bf16_8b": 435.2 / 474.2,
    "h200x2b-fsdp2_bf16": 141.6 / 190.5,
    "h200x2b-fsdp2_bf16_8b": 455.0 / 437.8,
}
"""What FP8 gave plain scripts of jobs in BF16; of FSDP2 with an all-gather in BF16."""

OTHERS = {"h100x2-fsdp2_torchao": "open", "h100x2-fsdp2_torchao_8b": "open"}
"""Verdicts of jobs that got no bounds."""


def test_every_recording_is_held() -> None:
    assert set(map(name_of, files(RECORDED))) == {*BF16_MS, *GAINS, *OTHERS}


@pytest.mark.parametrize("name", BF16_MS)
def test_the_bounds_hold_what_plain_scripts_of_bf16_take(name: str) -> None:
    """Beside the step that was watched; on two GPUs within 4%, by which runs of one script differ."""
    report = replayed(RECORDED / f"{name}.json.gz")
    watched = median(report.facts.observed.steps_ms)
    low, high = report.verdict.whole_step_low, report.verdict.whole_step_high
    assert low is not None
    assert high is not None
    slack = 0.04 if "x2" in name else 0.0
    assert low * (1 - slack) <= BF16_MS[name] / watched <= high * (1 + slack)
    assert report.answer.whole == (low, high)


@pytest.mark.parametrize("name", GAINS)
def test_no_plain_script_gains_more_than_the_most(name: str) -> None:
    report = replayed(RECORDED / f"{name}.json.gz")
    assert report.verdict.whole_step_low is None
    assert report.verdict.whole_step_high is not None
    assert GAINS[name] <= report.verdict.whole_step_high


def test_the_example_is_what_this_version_says(tmp_path: Path) -> None:
    path = tmp_path / "sharded.json"
    path.write_text(text_of(RECORDED / "h100-fsdp2_torchao_wide.json.gz"), encoding="utf-8")
    done = CliRunner().invoke(cli.main, ["report", str(path), "--format", "markdown"])
    assert done.stdout == EXAMPLE.read_text("utf-8"), "fp8doctor report sharded.json -o examples/sharded.md"


@pytest.mark.parametrize("name", OTHERS)
def test_no_bounds_without_a_verdict_on_compute(name: str) -> None:
    report = replayed(RECORDED / f"{name}.json.gz")
    assert report.verdict.whole_step_high is None
    assert report.verdict.status == OTHERS[name]


def test_ranks_that_were_killed_before_their_window_ended_are_printed() -> None:
    """A launcher that runs out of time ends both."""
    facts = replayed(RECORDED / "h200x2-zero2_torchao.json.gz").facts
    ranks = tuple(replace(each, observed=NOT_RECORDED) for each in facts.ranks.processes)
    seen = replace(facts.ranks, processes=ranks)
    assert "no window of steps was seen" in text.render(diagnose(replace(facts, ranks=seen)))
