"""The report: saved, replayed, refused when it cannot be read, and a gate before an expensive run."""

import gzip
import json
import os
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from msgspec.structs import replace
from torchao.float8 import convert_to_float8_training

import fp8doctor
from fp8doctor import load_report
from fp8doctor.analysis.treatment_table import STAY_IN_BF16
from fp8doctor.cli.pages import DEMO
from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.diagnosis.document import LARGEST_REPORT, Step
from fp8doctor.diagnosis.plan import prescribe
from fp8doctor.errors import UserError
from fp8doctor.facts import Facts, Observation
from fp8doctor.finding import Finding, Treatment
from fp8doctor.report import Prescription, Report, ReportFailed
from tests.facts_of import DECODER_468M
from tests.looked import looked
from tests.recordings import text_of
from tests.schema import FILE
from tests.schema import text as schema_text

RECORDED = Path(__file__).parent / "patients" / "recorded"


@pytest.fixture
def report() -> Report:
    return Report.of(diagnose(DECODER_468M))


def test_scalars_for_a_tracker() -> None:
    timed = load_report(RECORDED / "h200-llama_8b.json.gz")
    assert timed.scalars() == {
        "fp8doctor/speedup_x": timed.verdict.speedup,
        "fp8doctor/step_ms": timed.verdict.step_ms,
        "fp8doctor/bf16_step_ms": timed.verdict.bf16_step_ms,
        "fp8doctor/tokens_per_s": timed.verdict.tokens_per_s,
        "fp8doctor/peak_gib": pytest.approx(81.859, abs=1e-3),
        "fp8doctor/errors": 0.0,
        "fp8doctor/warnings": 0.0,
    }
    watched = load_report(RECORDED.parents[1] / "running/recorded/h200-lora_eager.json.gz").scalars()
    assert watched["fp8doctor/step_ms"] == pytest.approx(197.1, abs=0.05)
    assert watched["fp8doctor/estimated_speedup_x"] < 1
    assert "fp8doctor/speedup_x" not in watched


def test_times_of_a_cpu_are_no_scalars(report: Report) -> None:
    observed = Observation(clock="host", steps_ms=(5.0,) * 10)
    watched = Report.of(diagnose(replace(report.facts, observed=observed)))
    said = {name.rpartition("/")[2] for name in watched.scalars()}
    assert said <= {"estimated_speedup_x", "errors", "warnings"}


VERDICT = """status speedup speedup_low speedup_high basis achievable_speedup estimated_speedup step_ms
bf16_step_ms tokens_per_s best_step_ms best_variant best_basis whole_step_low whole_step_high open summary"""
FINDING = "code name area severity title evidence saving_ms treatment caused_by"


@pytest.mark.slow
def test_the_contract_of_the_json(report: Report) -> None:
    """The shipped schema is the generated one and holds; these keys stay."""
    schema, data = json.loads(FILE.read_text("utf-8")), json.loads(report.to_json())
    assert schema_text() == FILE.read_text(encoding="utf-8")
    jsonschema.validate(data, schema)
    assert list(data)[:2] == ["schema_version", "verdict"]
    assert list(data)[-3:] == ["tool", "created_at", "facts"]
    assert data["schema_version"] == 2
    assert set(data["verdict"]) == set(VERDICT.split())
    (finding,) = [each for each in data["findings"] if each["code"] == "CMP001"]
    assert set(FINDING.split()) <= set(finding)
    assert {"low", "high", "basis"} <= set(finding["saving_ms"])
    assert {"name", "summary", "code"} <= set(finding["treatment"])
    assert {"code", "treatment", "saving_ms"} <= set(data["prescription"][0])
    assert all({"code", "area", "outcome", "reason"} <= set(each) for each in data["outcomes"])
    data["verdict"]["status"] = "wonderful"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(data, schema)


def test_the_demo_is_a_recording() -> None:
    recorded = RECORDED.parents[1] / "benchmarks" / "recorded" / "h200-llama_8b_eager.json.gz"
    assert DEMO.read_bytes() == recorded.read_bytes()


@pytest.mark.slow
def test_replay_keeps_every_byte_of_this_version_and_what_another_one_wrote(
    report: Report, tmp_path: Path
) -> None:
    report.save(tmp_path / "a.json")
    replayed = load_report(tmp_path / "a.json")
    replayed.save(tmp_path / "b.json")
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    assert replayed == report
    other = {"created_at": "2020-01-01T00:00:00+00:00", "tool": {"name": "fp8doctor", "version": "9.0.1"}}
    data = report.to_dict() | other
    data["facts"]["network"]["linears"][0]["temperature_k"] = 300.5
    (tmp_path / "newer.json").write_text(json.dumps(data))
    again = load_report(tmp_path / "newer.json").to_dict()
    assert {name: again[name] for name in other} == other
    assert again["facts"]["network"]["linears"][0]["temperature_k"] == 300.5


SOUND = diagnose(DECODER_468M).to_dict()


def broken(**changes: Any) -> str:
    return json.dumps(SOUND | changes)


def first_arm(**changes: Any) -> str:
    """A report of a trial in whose first arm something is not what any trial gives."""
    saved = json.loads(text_of(RECORDED / "h200-lora_fp32.json.gz"))["facts"]
    saved["trial"]["arms"][0].update(changes)
    return broken(facts=saved)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "not JSON"),
        (broken()[:500], "not JSON"),
        ('{"schema_version": 1}', "not a report"),
        ("[" * 100_000, "nested too deep"),
        (broken(schema_version=99), "newer fp8doctor"),
        (broken(facts={"network": {"linears": 3}}), r"network\.linears"),
        (broken(facts={"workload": {"accumulate": 0}}), r"`\$\.workload\.accumulate`"),
        (broken(facts={"gpus": [{"compute_capability": "nine"}]}), r"`\$\.gpus\[0\]"),
        (broken(facts={"target": {"kind": "x\n" * 5_000}}), r"^.{,500}\$\.target\.kind`$"),
        (broken(facts={"network": {"parameters": 0, "adapter_parameters": 5}}), "5 of 0"),
        (broken(facts=SOUND["facts"] | {"assumed_gpu": "H300"}), "no datasheet"),
        (first_arm(step_ms=None), "'as_is' was timed"),
        (first_arm(rounds_ms=[]), "'as_is' was timed"),
        (first_arm(cuts=[]), "'as_is' was timed"),
        (first_arm(breakdown={"families_ms": {"gemm_16bit": -5.0}}), "less than 0 ms"),
    ],
    ids=range(15),
)
def test_what_cannot_be_replayed_is_refused_with_one_sentence(
    text: str, sentence: str, tmp_path: Path
) -> None:
    (tmp_path / "bad.json").write_text(text)
    with pytest.raises(UserError, match=sentence) as error:
        load_report(tmp_path / "bad.json")
    assert "\n" not in str(error.value)


def test_the_largest_number_is_kept_and_digits_in_a_text_are_none(tmp_path: Path) -> None:
    facts = {"network": {"parameters": 2**64 - 1}, "gaps": {"network": "9" * 400}}
    (tmp_path / "good.json").write_text(broken(facts=facts))
    assert load_report(tmp_path / "good.json").facts.network.parameters == 2**64 - 1


def test_arms_of_unlike_many_rounds_are_compared(tmp_path: Path) -> None:
    saved = json.loads(text_of(RECORDED / "h200-lora_fp32.json.gz"))
    saved["facts"]["trial"]["arms"][0]["rounds_ms"].pop()
    (tmp_path / "uneven.json").write_text(json.dumps(saved))
    report = load_report(tmp_path / "uneven.json")
    even = load_report(RECORDED / "h200-lora_fp32.json.gz")
    assert report.verdict.speedup == pytest.approx(even.verdict.speedup, rel=0.01)
    assert report.verdict.status == even.verdict.status
    assert str(report)


def test_a_report_cannot_be_written_where_no_folder_is(report: Report, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot write"):
        report.save(tmp_path / "no" / "folder.json")


@pytest.mark.slow
def test_raise_for_is_a_gate(report: Report) -> None:
    report.raise_for("error")
    with pytest.raises(ReportFailed, match="CMP001 eager-float8: 168 of 168") as failed:
        report.raise_for("warning")
    assert [finding.code for finding in failed.value.findings] == ["CMP001"]
    with pytest.raises(ValueError, match="severity is one of"):
        report.raise_for("fatal")  # type: ignore[arg-type]
    verdict = replace(report.verdict, status="fp8_not_engaged")
    with pytest.raises(ReportFailed):
        replace(report, findings=(), verdict=verdict).raise_for()
    empty = replace(Report.of(diagnose(Facts())), findings=())
    assert empty.worst() is None
    assert not empty.reaches("info")


def test_apply_says_what_it_did_and_warns_of_the_rest(capsys: pytest.CaptureFixture[str]) -> None:
    names = ("unset-variable", "compile-model", STAY_IN_BF16)
    steps = [step_of(name) for name in names]
    with pytest.warns(UserWarning, match=rf"unset-variable .*{STAY_IN_BF16} \(FP8 stays on") as said:
        Prescription(steps, Facts()).apply(torch.nn.Linear(2, 2))
    assert [each.filename for each in said if "fp8doctor" in str(each.message)] == [__file__]
    (line,) = capsys.readouterr().err.splitlines()
    assert "compile-model" in line


def test_apply_ends_what_raises_without_a_time(capsys: pytest.CaptureFixture[str]) -> None:
    """FP8 raises for a side of 12, and is not worth its casts; the model trains in BF16 afterwards."""
    layers = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 12)).bfloat16()
    model = convert_to_float8_training(layers)
    report = looked(model, torch.ones(32, 64, dtype=torch.bfloat16), assume_gpu="H100")
    assert report.verdict.status == "step_raises"
    assert [step.treatment.name for step in report.prescription] == [STAY_IN_BF16]
    assert not any("Float8" in type(each).__name__ for each in report.prescription.apply(model).modules())
    assert STAY_IN_BF16 in capsys.readouterr().err


def step_of(name: str) -> Step:
    treatment = Treatment(name=name, summary=f"{name} in words", code="pass")
    finding = Finding(title="t", explanation="e", code="ENV001", severity="warning", treatment=treatment)
    (step,) = prescribe([finding])
    return step


def test_the_public_names() -> None:
    assert set(fp8doctor.__all__) == {
        *("Plan", "Report", "compare", "inspect_model", "load_health", "load_report", "plan")
    }
    for name in fp8doctor.__all__:
        assert getattr(fp8doctor, name)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        fp8doctor.nonsense  # noqa: B018


@pytest.mark.slow
def test_only_a_regular_file_of_a_reports_size_is_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    huge, packed, damaged = (tmp_path / name for name in ("huge.json", "packed.json.gz", "damaged.json.gz"))
    with huge.open("wb") as file:
        file.truncate(LARGEST_REPORT + 1)
    packed.write_bytes(gzip.compress(bytes(LARGEST_REPORT + 1)))
    damaged.write_bytes(packed.read_bytes()[:10] + b"\xff" * 99)
    for path, said in (
        (tmp_path / "pipe", "is not a regular file"),
        (tmp_path, "is not a regular file"),
        (huge, "is larger than 256 MiB"),
        (packed, "is larger than 256 MiB"),
        (damaged, "its gzip content is damaged"),
        (tmp_path / "nowhere", "No such file"),
    ):
        with pytest.raises(UserError, match=said) as caught:
            load_report(path)
        assert "\n" not in str(caught.value)
