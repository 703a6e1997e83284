"""Causes before symptoms, what blocks FP8 before what slows it, then milliseconds."""

import msgspec
import pytest

from fp8doctor.analysis.conversion import keep_in_bf16
from fp8doctor.analysis.treatment_table import ON_THIS_GPU
from fp8doctor.areas import Severity
from fp8doctor.checks.shapes import gemms_too_small
from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.diagnosis.estimate import changes_fp8_alone
from fp8doctor.diagnosis.plan import prescribe
from fp8doctor.diagnosis.treatments import KEEP_IN_BF16, WRITTEN, describe
from fp8doctor.facts import NOT_RECORDED
from fp8doctor.finding import Finding, Saving, Treatment
from fp8doctor.recipes import BY_TREATMENT
from tests import replays
from tests.facts_of import DECODER_468M


def found(
    code: str, severity: Severity = "warning", saved_ms: float | None = None, treatment: str | None = None
) -> Finding:
    saving = None if saved_ms is None else Saving(low=saved_ms, high=saved_ms, basis="modelled", gpu="H100")
    cure = Treatment(name=treatment or f"cure-{code}", summary="s", code="c") if treatment != "" else None
    return Finding(
        title=f"title of {code}",
        explanation="e",
        code=code,
        name=code.lower(),
        area="step",
        severity=severity,
        saving_ms=saving,
        treatment=cure,
    )


@pytest.mark.parametrize(
    ("findings", "order"),
    [
        ([found("AAA001", saved_ms=5), found("BBB001", saved_ms=50), found("CCC1")], "BBB001 AAA001 CCC1"),
        ([found("AAA001", saved_ms=-5), found("BBB001")], "BBB001 AAA001"),
        ([found("AAA001", "info"), found("BBB001", "info", saved_ms=2)], "BBB001"),
    ],
    ids=["the larger saving first", "a cost last", "no information that saves nothing"],
)
def test_the_order(findings: list[Finding], order: str) -> None:
    assert [step.code for step in prescribe(findings)] == order.split()


@pytest.mark.parametrize("name", ["te_without_autocast", "te_lora_prepared", "te_checkpointed"])
def test_a_gpu_without_fp8_gets_no_advice_about_it(name: str) -> None:
    facts = replays.of("patients", f"h200-{name}").report.facts
    untimed = {"trial": NOT_RECORDED, "observed": NOT_RECORDED, "gpus": (), "assumed_gpu": "A100"}
    steps = diagnose(msgspec.structs.replace(facts, **untimed)).prescription
    assert "bf16-on-this-gpu" in [step.treatment.name for step in steps]
    assert not [
        step for step in steps if step.treatment.name not in ON_THIS_GPU.values() and changes_fp8_alone(step)
    ]


def test_findings_with_one_treatment_share_its_layers() -> None:
    def keeping(code: str, *layers: str) -> Finding:
        return msgspec.structs.replace(found(code), treatment=keep_in_bf16(layers))

    (step,) = prescribe([keeping("AAA001", "a", "b"), keeping("BBB001", "b", "c")])
    assert step.treatment.layers == ("a", "b", "c")
    assert step.treatment == keep_in_bf16(("a", "b", "c"))
    compile("\n".join(line for line in step.treatment.code.splitlines()), "lines", "exec")


def test_the_trial_can_put_into_words_whatever_it_tries_unasked() -> None:
    for name in (*WRITTEN, *BY_TREATMENT):
        treatment = describe(name, gemms_too_small.FIRES[0] if name == KEEP_IN_BF16 else DECODER_468M)
        assert treatment is not None
        assert treatment.name == name
        assert treatment.code.strip()


def test_nothing_of_fp8_is_mended_on_a_gpu_without_fp8() -> None:
    facts = msgspec.structs.replace(DECODER_468M, gpus=(), assumed_gpu="A100")
    document = diagnose(facts)
    assert {each.code for each in document.findings} == {"GPU002"}
    told = next(each for each in document.outcomes if each.code == "CMP001")
    assert told.outcome == "not_applicable"
    assert [each.treatment.name for each in document.prescription] == ["bf16-on-this-gpu"]


@pytest.mark.parametrize("name", ["h200x2-ddp_rank_killed", "h200x2-ddp_rank_raises"])
def test_a_job_that_was_stopped_keeps_the_fixes_of_its_steps(name: str) -> None:
    facts = replays.of("running", name).report.facts
    stopped, ended = diagnose(facts), diagnose(msgspec.structs.replace(facts, ranks=NOT_RECORDED))
    assert stopped.answer.fault is not None
    assert stopped.answer.fault.first
    names = [[step.treatment.name for step in each.prescription] for each in (stopped, ended)]
    assert names[0] == names[1] != []
