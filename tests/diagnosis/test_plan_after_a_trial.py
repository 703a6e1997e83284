"""What is left of a plan once it was timed, and when it ends with leaving FP8 off."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from fp8doctor import load_report, registry
from fp8doctor.analysis.arms import fair_bf16
from fp8doctor.analysis.trial_view import trial_view
from fp8doctor.diagnosis.diagnose import diagnose, hypotheses
from fp8doctor.diagnosis.document import Step
from fp8doctor.diagnosis.prescription import as_timed, prescribe
from fp8doctor.facts import Facts, recorded
from fp8doctor.facts.arm_names import Reason, bf16_with
from fp8doctor.finding import Finding, Treatment
from fp8doctor.render.words import variant_of
from tests.checks.arms import ran
from tests.diagnosis.trials import LOSING, SLOW, Of, around, explored, render
from tests.facts_of import DECODER_468M
from tests.test_recorded import RECORDED


def ends(arms: Mapping[str, tuple[float, ...] | str], **of: Any) -> list[str]:
    """Names of the plan after such a trial, of the check of eager FP8 alone."""
    report = diagnose(Of({**SLOW, **arms}, **of).facts(), select=["CMP001"])
    return [step.treatment.name for step in report.prescription]


@pytest.mark.parametrize(
    ("arms", "names"),
    [
        ({"prescribed": around(99.0)}, ["stay-in-bf16"]),
        ({"prescribed": around(92.0)}, ["stay-in-bf16"]),
        ({"prescribed": around(90.0)}, ["compile-blocks"]),
        ({"prescribed": Reason.NO_TIME_LEFT}, ["stay-in-bf16"]),
        ({"prescribed": around(99.0), "recipe-rowwise": Reason.NO_TIME_LEFT}, ["stay-in-bf16"]),
        ({"as_is": around(93.0), "prescribed": around(92.5)}, []),
        ({"as_is": around(93.0), "prescribed": (81.0, 99.0, 90.0, 95.0, 84.0, 90.0)}, []),
    ],
    ids=[
        "slower",
        "no faster than two copies of one step differ",
        "faster",
        "no time for it",
        "no time for another",
        "what runs is as fast",
        "noise does not change what runs",
    ],
)
def test_the_plan_ends_in_the_simplest_of_the_fastest(
    arms: dict[str, tuple[float, ...] | str], names: list[str]
) -> None:
    assert ends(arms, bases={"prescribed": "as_is", "recipe-rowwise": "prescribed"}) == names


def test_a_cpu_decides_nothing() -> None:
    assert ends({"prescribed": around(99.0)}, device="cpu") == ["compile-blocks"]


def test_bf16_with_the_same_fixes_is_the_end_if_it_is_faster() -> None:
    facts = Of(
        {**SLOW, "prescribed": around(88.0), "bf16_prescribed": around(80.0)},
        treatments=("compile-blocks", "attention-sdpa"),
        bases={"prescribed": "as_is"},
    ).facts()
    alike = msgspec.structs.replace(
        facts.trial.arms[-1], treatments=("attention-sdpa",), base="bf16_compiled"
    )
    trial = msgspec.structs.replace(facts.trial, arms=(*facts.trial.arms[:-1], alike))
    attention = msgspec.structs.replace(
        EAGER, code="MEM006", treatment=Treatment(name="attention-sdpa", summary="s", code="c")
    )
    view = trial_view(msgspec.structs.replace(facts, trial=trial))
    plan = as_timed(prescribe((EAGER, attention)), view)
    assert [step.treatment.name for step in plan] == ["stay-in-bf16", "attention-sdpa"]
    assert view.prescribed is not None
    assert fair_bf16(view.facts, view.prescribed) is alike, "the plan's FP8 is compared with it"


def test_bf16_with_what_the_trial_found_is_the_end_if_it_is_faster() -> None:
    """A BF16 twin builds on BF16 with the proposed fixes, so each fix has its own saving."""
    facts = Of({**SLOW, "prescribed": around(88.0)}, bases={"prescribed": "as_is"}).facts()
    fused, attention = "fused-optimizer", "attention-sdpa"
    twins = (
        ran("bf16_prescribed", 80.0, treatments=(attention,), base="bf16_compiled"),
        ran(fused, 85.0, treatments=(fused,), base="prescribed"),
        ran(bf16_with(fused), 70.0, treatments=(attention, fused), base="bf16_prescribed"),
    )
    facts = msgspec.structs.replace(
        facts, trial=msgspec.structs.replace(facts.trial, arms=(*facts.trial.arms, *twins))
    )
    asked = msgspec.structs.replace(
        EAGER, code="MEM006", treatment=Treatment(name=attention, summary="s", code="c")
    )
    view = trial_view(facts)
    assert view.end is not None
    assert (view.end.arm.name, view.end.changes) == (bf16_with(fused), (attention, fused))
    plan = as_timed(prescribe((EAGER, asked)), view)
    saved = [round(step.saving_ms.to_ms or 0.0) for step in plan if step.saving_ms]
    assert [step.treatment.name for step in plan] == ["stay-in-bf16", attention, fused]
    assert saved == [93, 80, 70]
    in_words = {each.name: variant_of(each, facts.trial.arms, fp8=True, plan={}) for each in twins}
    assert in_words[bf16_with(fused)] == "BF16, fused optimizer"
    msgspec.structs.replace(diagnose(facts), prescription=plan)


def test_what_the_trial_found_joins_the_plan_with_what_it_saved_on_top_of_its_base() -> None:
    plan = diagnose(explored(), select=["CMP001"]).prescription
    assert [step.treatment.name for step in plan] == ["compile-blocks", "recipe-rowwise"]
    found = plan[1]
    assert found.saving_ms is not None
    assert (found.code, found.saving_ms.basis, round(found.saving_ms.middle, 1)) == ("", "measured", 8.3)
    assert 'from_recipe_name("rowwise")' in found.treatment.code


def test_what_was_timed_and_left_out_of_the_total_is_not_prescribed() -> None:
    plan = diagnose(
        explored(treatments=("recipe-rowwise",), **{"compile-blocks": around(300.0)})
    ).prescription
    assert [step.treatment.name for step in plan] == ["recipe-rowwise"]


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
    assert TOO_LARGE in render(report)


def test_of_fixes_that_do_not_fit_together_none_is_prescribed_but_the_total_that_fits() -> None:
    plan = diagnose(with_too_large(Of(SLOW, bases={}).facts(), "prescribed")).prescription
    assert "compile-blocks" not in [step.treatment.name for step in plan]
    proposed = tuple(
        Step(code="", mends=(), title="t", treatment=Treatment(name=name, summary="s", code="c"))
        for name in ("compile-blocks", "larger-batch", "cache-off")
    )
    arms = {**SLOW, "compile-blocks": SLOW["prescribed"], "prescribed": Reason.DOES_NOT_FIT}
    together = Of(arms, ("compile-blocks", "larger-batch"), bases={"compile-blocks": "as_is"})
    held = as_timed(proposed, trial_view(together.facts()))
    assert [step.treatment.name for step in held] == ["compile-blocks", "cache-off"]


def test_fp8_that_stays_slower_ends_the_plan_with_bf16() -> None:
    report = diagnose(Of({**SLOW, "prescribed": around(100.0)}, bases={}).facts())
    assert [step.treatment.name for step in report.prescription] == ["stay-in-bf16"]
    last = report.prescription[-1].saving_ms
    assert last is not None
    assert round(last.middle, 1) == 273.4, "of the step as it is"


STAYING: dict[str, tuple[tuple[float, float], Facts, str, str]] = {
    "compiled": (
        (103.6, 92.7),
        DECODER_468M,
        "go back to BF16, compiled: ",
        "for block in model.blocks:\n    block.compile()",
    ),
    "eager is best": ((92.7, 95.0), DECODER_468M, "go back to BF16: ", ""),
    "with a cache": (
        (103.6, 92.7),
        msgspec.structs.replace(
            DECODER_468M,
            training=msgspec.structs.replace(DECODER_468M.training, use_cache=True, cache_switch=""),
        ),
        "go back to BF16, compiled: ",
        "for block in model.blocks:\n    block.compile()\n"
        "model.config.use_cache = False   # a KV cache slows the compiled blocks down",
    ),
    "without blocks": (
        (103.6, 92.7),
        msgspec.structs.replace(
            DECODER_468M, network=msgspec.structs.replace(DECODER_468M.network, blocks=())
        ),
        "go back to BF16, compiled: ",
        "model = torch.compile(model)",
    ),
}


@pytest.mark.parametrize(("bf16", "base", "summary", "lines"), STAYING.values(), ids=STAYING)
def test_the_plan_stays_in_the_bf16_that_was_fastest(
    bf16: tuple[float, float], base: Facts, summary: str, lines: str
) -> None:
    eager, compiled = map(around, bf16)
    arms = {**SLOW, "bf16": eager, "bf16_compiled": compiled, "prescribed": around(100.0)}
    last = diagnose(Of(arms, bases={}).facts(base)).prescription[-1].treatment
    assert last.summary.startswith(summary)
    assert last.code == "\n".join(filter(None, ["# leave out the conversion to FP8", lines]))


@pytest.mark.parametrize(
    ("own_ms", "summary", "lines"),
    [
        (80.0, "go back to BF16, under your own torch.compile: ", "# leave your own torch.compile as it is"),
        (
            99.0,
            "go back to BF16, compiled: ",
            "# leave out your own torch.compile\nfor block in model.blocks:\n    block.compile()",
        ),
    ],
    ids=["his own is best", "block by block is best"],
)
def test_fp8_is_judged_against_the_users_own_form_of_bf16(own_ms: float, summary: str, lines: str) -> None:
    arms = {**SLOW, "as_is": around(102.0), "bf16_as_compiled": around(own_ms), "prescribed": around(101.0)}
    facts = Of(arms, bases={}).facts()
    report, best_ms = diagnose(facts), min(own_ms, 92.7)
    assert report.verdict.bf16_step_ms == best_ms
    assert report.verdict.speedup == pytest.approx(best_ms / 102.0, abs=0.005)
    last = report.prescription[-1].treatment
    assert last.summary.startswith(summary)
    assert last.code == f"# leave out the conversion to FP8\n{lines}"
    assert "\nBF16, your torch.compile" in render(report)


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
        (DECODER_468M, (LOSING, EAGER), ["stay-in-bf16"]),
        (DECODER_468M, (LOSING,), ["stay-in-bf16"]),
        (
            DECODER_468M,
            (LOSING, msgspec.structs.replace(EAGER, code="MEM001")),
            ["stay-in-bf16"],
        ),
        (EVEN_FP8.facts(), (LOSING, EAGER), ["stay-in-bf16"]),
        (
            Of({**SLOW, "prescribed": around(100.0)}).facts(),
            (LOSING, EAGER),
            ["stay-in-bf16"],
        ),
    ],
    ids=[
        "no trial",
        "nothing else",
        "nothing else of FP8's own",
        "even once prescribed",
        "slower even as prescribed",
    ],
)
def test_fp8_is_never_mended_and_given_up_in_one_plan_unless_that_was_measured(
    facts: Facts, findings: tuple[Finding, ...], names: list[str]
) -> None:
    assert [step.treatment.name for step in as_timed(prescribe(findings, facts), trial_view(facts))] == names


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


def test_what_a_plan_in_bf16_leaves_out_is_timed_all_the_same() -> None:
    report = load_report(RECORDED / "h200-accelerate_eager.json.gz")
    assert "compile-blocks" not in [step.treatment.name for step in report.prescription]
    assert "compile-blocks" in [step.treatment.name for step in hypotheses(report.facts)]


def test_a_plan_that_leaves_fp8_off_converts_no_adapters_in_another_order() -> None:
    report = load_report(RECORDED / "h200-te_lora_prepared.json.gz")
    assert {"LORA003", "MOD007"} <= {each.code for each in report.findings}
    assert [step.treatment.name for step in report.prescription] == ["stay-in-bf16"]
