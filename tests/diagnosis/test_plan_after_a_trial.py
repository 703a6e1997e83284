"""What is left of a plan once it was timed, and when it ends with leaving FP8 off."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from fp8doctor import load_report, registry
from fp8doctor.analysis.trial_view import TrialView
from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.diagnosis.plan import make_plan
from fp8doctor.facts import Facts, recorded
from fp8doctor.facts.arm_names import Reason
from fp8doctor.finding import Finding, Treatment
from tests.diagnosis.trials import LOSING, SLOW, Of, around
from tests.facts_of import DECODER_468M
from tests.test_recorded import RECORDED


def ends(arms: Mapping[str, tuple[float, ...] | str], **of: Any) -> list[str]:
    """Names of the plan after such a trial, of the check of eager FP8 alone."""
    report = diagnose(Of({**SLOW, **arms}, **of).facts(), select=["CMP001"])
    return [step.treatment.name for step in report.prescription]


def test_a_cpu_decides_nothing() -> None:
    assert ends({"prescribed": around(99.0)}, device="cpu") == ["compile-blocks"]


TOO_LARGE = "its step takes 93.4 GiB at full depth"


def with_too_large(facts: Facts, *names: str) -> Facts:
    """The same trial, in which these arms take more memory than there is."""
    arms = tuple(
        msgspec.structs.replace(each, tried=False, why=Reason.DOES_NOT_FIT, reason=TOO_LARGE)
        if each.name in names
        else each
        for each in facts.trial.arms
    )
    return msgspec.structs.replace(facts, trial=msgspec.structs.replace(facts.trial, arms=arms))


def test_a_fix_that_does_not_fit_is_not_prescribed_and_its_finding_says_so() -> None:
    facts = with_too_large(
        Of({**SLOW, "compile-blocks": around(90.0)}, bases={"compile-blocks": "as_is"}).facts(),
        "prescribed",
        "compile-blocks",
    )
    report = diagnose(facts, select=["CMP001"])
    assert [step.treatment.name for step in report.prescription] == ["stay-in-bf16"]
    (finding,) = report.findings
    assert (finding.treatment, finding.saving_ms) == (None, None)


STAYING: dict[str, tuple[tuple[float, float], Facts, str]] = {
    "compiled": (
        (103.6, 92.7),
        DECODER_468M,
        "for block in model.blocks:\n    block.compile()",
    ),
    "eager is best": ((92.7, 95.0), DECODER_468M, ""),
    "with a cache": (
        (103.6, 92.7),
        msgspec.structs.replace(
            DECODER_468M,
            training=msgspec.structs.replace(DECODER_468M.training, use_cache=True, cache_switch=""),
        ),
        "for block in model.blocks:\n    block.compile()\n"
        "model.config.use_cache = False   # a KV cache slows the compiled blocks down",
    ),
    "without blocks": (
        (103.6, 92.7),
        msgspec.structs.replace(
            DECODER_468M, network=msgspec.structs.replace(DECODER_468M.network, blocks=())
        ),
        "model = torch.compile(model)",
    ),
}


@pytest.mark.parametrize(("bf16", "base", "lines"), STAYING.values(), ids=STAYING)
def test_the_plan_stays_in_the_bf16_that_was_fastest(
    bf16: tuple[float, float], base: Facts, lines: str
) -> None:
    eager, compiled = map(around, bf16)
    arms = {**SLOW, "bf16": eager, "bf16_compiled": compiled, "prescribed": around(100.0)}
    last = diagnose(Of(arms, bases={}).facts(base)).prescription[-1].treatment
    assert last.code == "\n".join(filter(None, ["# leave out the conversion to FP8", lines]))


@pytest.mark.parametrize("late", ["bf16_as_compiled", "bf16_compiled"])
def test_the_users_own_compile_stays_if_bf16_under_it_was_not_timed(late: str) -> None:
    """Its lines then have no measured saving, and the time of another form of BF16 is no promise."""
    arms = {**SLOW, "as_is": around(140.0), "prescribed": around(139.0), late: Reason.NO_TIME_LEFT}
    report = diagnose(Of(arms).facts(compiled_by_block(DECODER_468M)))
    last = report.prescription[-1]
    assert last.treatment.code == "# leave out the conversion to FP8\n# leave your own torch.compile as it is"
    assert last.saving_ms is None
    assert last.treatment.name == "stay-in-bf16"
    assert report.answer.compared.end is None


def compiled_by_block(facts: Facts) -> Facts:
    """The facts of a job whose blocks the user compiles."""
    linears = tuple(
        msgspec.structs.replace(each, compiled=each.name.rpartition(".")[0]) for each in facts.network.linears
    )
    blocks = tuple(msgspec.structs.replace(each, compiled=each.count) for each in facts.network.blocks)
    network = msgspec.structs.replace(facts.network, linears=linears, blocks=blocks)
    return msgspec.structs.replace(facts, network=network)


EAGER = Finding(
    title="t",
    explanation="e",
    code="CMP001",
    severity="warning",
    treatment=Treatment(name="compile-blocks", summary="s", code="c"),
)


EVEN_FP8 = Of({**SLOW, "prescribed": around(92.7)}, bases={"prescribed": "as_is"})


@pytest.mark.parametrize(
    ("facts", "findings", "names"),
    [
        (DECODER_468M, (LOSING, EAGER), ["compile-blocks"]),
        (EVEN_FP8.facts(), (LOSING, EAGER), ["compile-blocks"]),
        (
            Of({**SLOW, "prescribed": around(100.0)}).facts(),
            (LOSING, EAGER),
            ["stay-in-bf16"],
        ),
    ],
    ids=["no trial", "even once prescribed", "slower even as prescribed"],
)
def test_fp8_is_never_mended_and_given_up_in_one_plan_unless_that_was_measured(
    facts: Facts, findings: tuple[Finding, ...], names: list[str]
) -> None:
    assert [step.treatment.name for step in make_plan(TrialView(facts), findings)] == names


@pytest.mark.parametrize("patient", ["accelerate_eager", "nf4_base", "setting_without_effect"])
def test_recordings_whose_layers_all_lose_are_not_told_to_mend_fp8_and_to_give_it_up(patient: str) -> None:
    """Layers that do not learn because of the conversion do so without it."""
    report = load_report(RECORDED / f"h200-{patient}.json.gz")
    losing = next(each for each in report.findings if each.code == "SHP002")
    assert losing.treatment is not None
    first, *others = report.prescription
    assert losing.treatment.name == first.treatment.name == "stay-in-bf16"
    assert {each.code for each in report.findings if recorded(each, "breaks")} <= set(first.mends)
    changing = {check.code for check in registry.discover() if check.changes_fp8}
    assert not changing.intersection(code for step in others for code in step.mends)
