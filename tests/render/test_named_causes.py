"""A headline that says slower is followed by the cause, or by the sentence that none is known."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from msgspec.structs import replace

from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.render.box import answer
from fp8doctor.report import load_report
from tests.facts_of import DECODER_468M
from tests.recordings import files

TESTS = Path(__file__).parents[1]
ALL = [path for of in ("patients", "benchmarks", "running") for path in files(TESTS / of / "recorded")]
UNSLOTH = TESTS / "patients" / "recorded" / "h200-unsloth_float8_training.json.gz"


def test_blocks_that_unsloth_may_have_compiled_have_no_speed_as_they_are() -> None:
    report = load_report(UNSLOTH)
    said = answer(report)
    assert report.verdict.estimated_speedup is None
    assert said.what == "FP8 may be faster or slower than BF16"
    assert said.why[-1].endswith(
        "Unsloth compiles blocks itself, and fp8doctor did not see if it did. Not compiled, FP8 would run at "
        "0.40x the speed of BF16."
    )
    assert said.then.sentence.startswith("If Unsloth compiles its blocks: about 1.13x ")


def test_a_gap_whose_check_is_ignored_is_explained_by_the_estimate() -> None:
    facts = replace(DECODER_468M, assumed_gpu="H200")
    said = answer(diagnose(facts, ignore=["CMP001"]))
    assert " slower than BF16" in said.what
    parts = "FP8 takes about 376.6 ms/step, compiled BF16 97.5 (estimated): matmuls −26.1, "
    assert said.why[0].startswith(parts)
    assert said.why[1:] == (
        "No check found anything that slows FP8 down: compiling it explains most of the gap (estimated).",
    )
    assert said.then.sentence.startswith("As it is: about 0.")
    assert "x compiled (estimated for H200)." in said.then.sentence


@pytest.mark.slow
@pytest.mark.parametrize("path", ALL, ids=lambda path: path.name)
def test_a_slower_fp8_has_a_cause_or_none_is_known(path: Path) -> None:
    said = answer(load_report(path))
    if re.search(r"is .*slower than BF16", said.what):
        assert said.causes or any("gap" in each or "cost more than" in each for each in said.why)
        assert "As it is: about 1." not in said.then.sentence
