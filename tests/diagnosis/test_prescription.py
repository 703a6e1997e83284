"""Causes before symptoms, what blocks FP8 before what slows it, then milliseconds."""

from __future__ import annotations

import copy

import msgspec
import pytest

from fp8doctor.analysis.treatment_table import CONVERT_BASE_FIRST, TREATMENTS
from fp8doctor.analysis.trial_view import trial_view
from fp8doctor.areas import Severity
from fp8doctor.checks.lora import adapters_converted
from fp8doctor.checks.shapes import gemms_too_small
from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.diagnosis.document import Step
from fp8doctor.diagnosis.leaving_fp8 import stay_in_bf16
from fp8doctor.diagnosis.prescription import as_timed, prescribe
from fp8doctor.diagnosis.treatments import KEEP_IN_BF16, describe, keep_in_bf16
from fp8doctor.facts import CompileMark, Facts, Network
from fp8doctor.finding import Finding, Saving, Treatment
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


def codes(*findings: Finding) -> list[str]:
    return [step.code for step in prescribe(findings)]


def test_the_larger_saving_comes_first() -> None:
    assert codes(found("AAA001", saved_ms=5), found("BBB001", saved_ms=50), found("CCC001")) == [
        "BBB001",
        "AAA001",
        "CCC001",
    ]


@pytest.mark.parametrize(("left_out", "told"), [("up down", ["BBB001"]), ("down", ["AAA001", "BBB001"])])
def test_no_layer_is_compiled_and_left_out(left_out: str, told: list[str]) -> None:
    def of(finding: Finding, layers: str) -> Finding:
        assert finding.treatment is not None
        named = msgspec.structs.replace(finding.treatment, layers=tuple(layers.split()))
        return msgspec.structs.replace(finding, treatment=named)

    compiled = of(found("AAA001", saved_ms=5, treatment="compile-layers"), "up")
    kept = of(found("BBB001", saved_ms=1, treatment=KEEP_IN_BF16), left_out)
    steps = as_timed(prescribe((compiled, kept)), trial_view(Facts()))
    assert [step.code for step in steps] == told
    assert steps[0].saving_ms is not None
    assert steps[0].saving_ms.high == 5, "what the layer loses, eager as it is, is saved by either"
    assert {code for step in steps for code in step.mends} == {"AAA001", "BBB001"}


def filtered(share: int) -> Finding:
    """A layer of so many is to be left out of the conversion, in a decoder in FP8."""
    in_fp8 = [each.name for each in DECODER_468M.network.linears if each.use == "training"]
    finding = found("SHP007", "error", treatment="")
    return msgspec.structs.replace(finding, treatment=keep_in_bf16(in_fp8[::share], DECODER_468M))


COMPILED = found("CMP001", saved_ms=5, treatment="compile-blocks")
GIVEN_UP = found("SHP002", saved_ms=1, treatment="stay-in-bf16")


@pytest.mark.parametrize(
    ("findings", "told"),
    [
        ((filtered(2), COMPILED), [("keep-in-bf16", "SHP007"), ("compile-blocks", "CMP001")]),
        ((filtered(1), COMPILED), [("keep-in-bf16", "SHP007 CMP001")]),
        ((filtered(1), COMPILED, GIVEN_UP), [("stay-in-bf16", "SHP002 SHP007 CMP001")]),
        (
            (filtered(1), found("MEM003", treatment="autocast-bf16")),
            [("keep-in-bf16", "SHP007"), ("autocast-bf16", "MEM003")],
        ),
        (
            (filtered(1), found("MOD001", treatment="convert-the-rest")),
            [("keep-in-bf16", "SHP007"), ("convert-the-rest", "MOD001")],
        ),
        (
            (filtered(1), found("CMP002", treatment="enable-dynamo")),
            [("keep-in-bf16", "SHP007"), ("enable-dynamo", "CMP002")],
        ),
        (
            (filtered(1), found("CMP003", treatment="log-outside-graph"), GIVEN_UP),
            [("stay-in-bf16", "SHP002 SHP007")],
        ),
    ],
    ids=[
        "half of it",
        "all of it",
        "given up",
        "what is not of FP8 stays",
        "others are converted",
        "what hinders compiled BF16 too stays",
        "nor is it mended by giving FP8 up",
    ],
)
def test_nothing_makes_fp8_faster_that_another_step_leaves_no_layer_of(
    findings: tuple[Finding, ...], told: list[tuple[str, str]]
) -> None:
    steps = as_timed(prescribe(findings), trial_view(DECODER_468M), frozenset({"SHP007"}))
    assert [(step.treatment.name, " ".join(step.mends)) for step in steps] == told
    is_last = "which leaves none in FP8" in steps[0].treatment.summary
    assert is_last == (told == [("keep-in-bf16", "SHP007 CMP001")] or told[-1][1] in ("MEM003", "CMP002"))


def test_bf16_keeps_a_compilation_of_the_user_that_nothing_was_timed_beside() -> None:
    def lines(*marks: CompileMark) -> str:
        training = msgspec.structs.replace(DECODER_468M.training, compile_marks=marks)
        return stay_in_bf16(msgspec.structs.replace(DECODER_468M, training=training)).code

    assert lines().endswith("model = torch.compile(model)   # or block by block")
    whole = CompileMark(name="", form="wrapped", backend="inductor", compiles=True)
    assert lines(whole).endswith("# leave your own torch.compile as it is")
    assert "torch.compile(model)" in lines(msgspec.structs.replace(whole, compiles=False))
    assert "torch.compile(model)" in lines(msgspec.structs.replace(whole, backend="aot_eager"))


def test_a_filter_that_leaves_adapters_out_is_the_only_conversion() -> None:
    kept = found("AAA001", treatment=KEEP_IN_BF16)
    converted_first = found("BBB001", treatment=CONVERT_BASE_FIRST)
    (step,) = as_timed(prescribe((kept, converted_first)), trial_view(adapters_converted.SICK))
    assert (step.treatment.name, step.mends) == (KEEP_IN_BF16, ("AAA001", "BBB001"))
    without_adapters = Facts(network=Network(linears=()))
    assert len(as_timed(prescribe((kept, converted_first)), trial_view(without_adapters))) == 2


def test_what_makes_fp8_impossible_comes_before_any_saving() -> None:
    assert codes(found("AAA001", saved_ms=500), found("BBB001", "error")) == ["BBB001", "AAA001"]


def test_a_treatment_that_costs_time_comes_last() -> None:
    assert codes(found("AAA001", saved_ms=-5), found("BBB001"), found("CCC001", saved_ms=1)) == [
        "CCC001",
        "BBB001",
        "AAA001",
    ]


def test_information_is_prescribed_only_when_it_saves_something() -> None:
    assert codes(found("AAA001", "info"), found("BBB001", "info", saved_ms=2)) == ["BBB001"]


def test_information_whose_saving_the_timing_does_not_tell_is_no_fix() -> None:
    """Compiling block by block, for the seconds that it saves at the start, beside "leave FP8 off"."""
    noisy = Saving(low=-14.0, high=14.0, basis="measured", gpu="NVIDIA H200")
    told, unsure = (
        msgspec.structs.replace(found("AAA001", each), saving_ms=noisy) for each in ("warning", "info")
    )
    assert codes(told) == ["AAA001"]
    assert codes(unsure) == []


def test_a_symptom_is_dropped_when_its_cause_was_found_and_kept_when_not() -> None:
    symptom = msgspec.structs.replace(found("AAA001", "error"), caused_by=("BBB001",))
    assert codes(symptom, found("BBB001")) == ["BBB001"]
    assert codes(symptom, found("CCC001")) == ["AAA001", "CCC001"]


def test_information_explains_no_symptom_away() -> None:
    symptom = msgspec.structs.replace(found("AAA001", "error"), caused_by=("BBB001",))
    assert codes(symptom, found("BBB001", "info")) == ["AAA001"]


def test_findings_with_one_treatment_share_a_step() -> None:
    both = found("AAA001", treatment="compile"), found("BBB001", saved_ms=3, treatment="compile")
    (step,) = prescribe(both)
    assert (step.code, step.mends) == ("BBB001", ("BBB001", "AAA001"))
    assert step.saving_ms is not None
    assert step.saving_ms.middle == 3


def test_a_finding_without_treatment_prescribes_nothing() -> None:
    assert codes(found("AAA001", treatment="")) == []
    assert codes() == []


def test_findings_with_one_treatment_share_its_layers() -> None:
    def keeping(code: str, *layers: str) -> Finding:
        return Finding(
            title="t", explanation="e", code=code, severity="warning", treatment=keep_in_bf16(layers)
        )

    (step,) = prescribe([keeping("AAA001", "a", "b"), keeping("BBB001", "b", "c")])
    assert step.treatment.layers == ("a", "b", "c")
    assert step.treatment == keep_in_bf16(("a", "b", "c"))
    compile("\n".join(line for line in step.treatment.code.splitlines()), "lines", "exec")


def test_a_prescription_is_the_sequence_of_its_steps() -> None:
    plan = prescribe([found("AAA001", saved_ms=5), found("BBB001")])
    assert (len(plan), plan[0].code, [step.code for step in plan]) == (2, "AAA001", ["AAA001", "BBB001"])
    assert plan == tuple(plan)
    assert copy.deepcopy(plan) == plan
    assert msgspec.convert(msgspec.json.decode(msgspec.json.encode(plan)), type=tuple[Step, ...]) == plan


def test_the_trial_can_put_into_words_whatever_it_tries_unasked() -> None:
    for name in (name for name, each in TREATMENTS.items() if each.lines):
        treatment = describe(name, gemms_too_small.SICK if name == KEEP_IN_BF16 else DECODER_468M)
        assert treatment is not None
        assert treatment.name == name
        assert treatment.code.strip()


def test_equal_findings_are_ordered_by_code() -> None:
    assert codes(found("BBB001"), found("AAA001")) == ["AAA001", "BBB001"]


def test_giving_fp8_up_comes_last_whatever_it_saves() -> None:
    assert codes(
        found("AAA001", saved_ms=50, treatment="stay-in-bf16"), found("BBB001", saved_ms=1), found("CCC001")
    ) == ["BBB001", "CCC001", "AAA001"]


def test_nothing_of_fp8_is_mended_on_a_gpu_without_fp8() -> None:
    facts = msgspec.structs.replace(DECODER_468M, gpus=(), assumed_gpu="A100")
    document = diagnose(facts)
    assert {each.code for each in document.findings} == {"GPU001", "GPU005"}
    told = next(each for each in document.outcomes if each.code == "CMP001")
    assert told.outcome == "not_applicable"
    assert [each.treatment.name for each in document.prescription] == ["bf16-on-this-gpu"]
