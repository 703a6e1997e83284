"""Every patient: its disease is found, and nothing that it has not."""

import json

import pytest
from click.testing import CliRunner, Result

from fp8doctor import cli
from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.report import Report
from fp8doctor.worker import parent
from research import matrix
from tests.clinic import Patient, examined, patients

PATIENTS = {patient.name: patient for patient in patients()}

each_patient = pytest.mark.parametrize("patient", PATIENTS.values(), ids=PATIENTS)


def report_on(patient: Patient) -> Report:
    examination = examined(patient)
    assert examination.problem is None
    return Report.of(diagnose(examination.facts))


@pytest.mark.slow
@each_patient
def test_diagnosis(patient: Patient) -> None:
    report = report_on(patient)
    graver = [each for each in report.findings if each.severity != "info"]
    found = {key for each in graver for key in (each.code, each.name)}
    assert set(patient.must) <= set(found)
    assert not set(patient.must_not) & set(found)
    assert patient.healthy == (not patient.must)
    assert not patient.healthy or not found
    assert not patient.healthy or report.worst() in (None, "info")
    unanswered = [each for each in report.outcomes if each.outcome in ("unknown", "crashed")]
    elsewhere = ("trial", "observed", "ranks")  # on a current stack nothing else stays unknown
    assert [each for each in unanswered if each.get("missing") not in elsewhere] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "parameters", "fp8_linears", "blocks"),
    [
        ("decoder_468m", 468_239_360, 168, 24),
        ("decoder_454m", 454_166_528, 120, 24),
        ("llama_8b", 8_030_261_248, 224, 32),
    ],
)
def test_sizes_of_the_documented_models(name: str, parameters: int, fp8_linears: int, blocks: int) -> None:
    network = examined(PATIENTS[name]).facts.network
    assert network.parameters == parameters
    assert sum(linear.use == "training" for linear in network.linears) == fp8_linears
    assert [each.count for each in network.blocks] == [blocks]


@pytest.mark.slow
def test_the_heads_are_heads_and_stay_in_16_bits() -> None:
    for name in ("decoder_468m", "decoder_454m", "llama_gqa", "llama_8b"):
        heads = [linear for linear in examined(PATIENTS[name]).facts.network.linears if linear.role == "head"]
        assert [(head.use, head.dtype) for head in heads] == [("none", "bfloat16")], name


@pytest.mark.slow
def test_the_cause_is_prescribed_and_its_symptom_is_not() -> None:
    report = report_on(PATIENTS["env_overridden"])
    assert {finding.code for finding in report.findings} >= {"ENV001", "MOD001"}
    prescribed = [step.code for step in report.prescription]
    assert prescribed[0] == "ENV001"
    assert "MOD001" not in prescribed


@pytest.mark.slow
def test_every_check_is_seen_sick_and_healthy() -> None:
    """``python -m research.matrix`` prints by which objects."""
    assert matrix.empty() == set()


def command_line(monkeypatch: pytest.MonkeyPatch, name: str) -> Result:
    """What the command says of a patient, whose facts are those of the tests before."""
    monkeypatch.setattr(parent, "examine_in_worker", lambda *_, **__: examined(PATIENTS[name]))
    return CliRunner().invoke(cli.main, [f"tests/patients/{name}.py", "--format", "json"])


@pytest.mark.slow
def test_a_warning_leaves_the_exit_code_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    done = command_line(monkeypatch, "decoder_468m")
    assert done.exit_code == 0, done.stderr
    assert [
        finding["code"] for finding in json.loads(done.stdout)["findings"] if finding["severity"] != "info"
    ] == ["CMP001"]


@pytest.mark.slow
def test_fp8_that_is_not_engaged_fails_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    done = command_line(monkeypatch, "gpt2_conv1d")
    assert done.exit_code == 1, done.stderr
    assert json.loads(done.stdout)["verdict"]["status"] == "fp8_not_engaged"
