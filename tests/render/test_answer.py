"""The four short lines at the top of a page."""

from __future__ import annotations

import re
from typing import Any

import pytest
from msgspec.structs import replace

from fp8doctor import load_report
from fp8doctor.analysis.treatment_table import that_help_bf16_too
from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.diagnosis.document import Document
from fp8doctor.facts import NOT_RECORDED, Facts, Trial, Workload
from fp8doctor.facts.arm_names import Reason
from fp8doctor.render.box import answer
from fp8doctor.render.certainty import certainty
from fp8doctor.render.environment_page import for_support
from fp8doctor.render.header import model
from fp8doctor.render.headline import headline
from tests.checks.arms import failed, ran, timed
from tests.checks.step.profiled import FP8_EAGER
from tests.diagnosis.trials import Of, around, without_fp8
from tests.facts_of import DECODER_468M
from tests.render.reports import EAGER_DECODER
from tests.render.test_html import DEMO
from tests.test_recorded import RECORDED, RECORDINGS

UNALIGNED = replace(
    DECODER_468M,
    workload=Workload(batch_source="given", batch_size=1, sequence_length=1003, tokens=1003),
)
"""Rows whose weight gradient raises on a GPU, by rule."""


def with_verdict(**fields: Any) -> Document:
    return replace(EAGER_DECODER, verdict=replace(EAGER_DECODER.verdict, **fields))


def test_the_ratio_is_that_of_the_two_numbers_beside_it() -> None:
    said = answer(load_report(DEMO))
    of, against = map(float, re.findall(r"\d+\.\d", said.numbers))
    assert said.what == f"FP8 is {of / against:.1f}x slower than BF16"


RANGE = re.compile(r"^(Slower|Faster): yes\. How much: no, ([\d.]+)x to ([\d.]+)x in \d+ rounds")


def test_a_wide_ratio_is_told_with_its_ends() -> None:
    """The side is sure and the number is not: rounds of 734 to 1,204 ms."""
    wide = Of({"as_is": (734.0, 872.2, 945.2, 951.9, 988.3, 1203.8), "bf16_compiled": around(185.0)}).facts()
    told = "Slower: yes. How much: no, 4.0x to 6.5x in 6 rounds: the rounds differ by a tenth or more."
    assert certainty(diagnose(wide)) == told
    narrow = Of({"as_is": around(952.0), "bf16_compiled": around(185.0)}).facts()
    assert certainty(diagnose(narrow)) == "Yes: 5.1x to 5.2x slower in 6 rounds (90% interval)."


@pytest.mark.slow
def test_the_ratio_of_every_recorded_job_is_within_the_ends_beside_it() -> None:
    wide = 0
    for path in RECORDINGS:
        said = answer(load_report(path))
        if ends := RANGE.search(said.sure):
            wide += 1
            told = re.search(r"([\d.]+)x", said.what)
            assert told
            assert float(ends[2]) <= float(told[1]) <= float(ends[3])
            assert said.what.endswith(f"{ends[1].lower()} than BF16")
    assert wide > 5


@pytest.mark.parametrize(
    ("fields", "tone", "what", "numbers"),
    [
        (
            {
                "status": "fp8_faster",
                "basis": "measured",
                "speedup": 1.2,
                "step_ms": 50.04,
                "bf16_step_ms": 60.0,
            },
            "good",
            "FP8 is 1.20x faster than BF16",
            "50.0 vs 60.0 ms/step, measured",
        ),
        (
            {"status": "fp8_slower", "basis": "modelled", "speedup": 0.4},
            "bad",
            "FP8 is slower than BF16 (estimated)",
            "",
        ),
        (
            {"status": "no_fp8", "basis": "measured", "step_ms": 5.0, "bf16_step_ms": 4.0},
            "plain",
            "No FP8 training here",
            "5.0 ms/step, measured",
        ),
        ({"status": "a_later_one", "basis": None}, "plain", "a later one", ""),
    ],
)
def test_what_a_verdict_is_called(fields: dict[str, Any], tone: str, what: str, numbers: str) -> None:
    said = answer(with_verdict(**{"step_ms": None, "bf16_step_ms": None} | fields))
    assert (said.tone, said.what, said.numbers) == (tone, what, numbers)


def test_a_step_that_was_timed_without_fp8_is_not_called_untimed() -> None:
    """The budget may end before the conversion, or nothing of it be compiled."""
    arms: dict[str, tuple[float, ...] | str] = {
        "as_is": around(103.6),
        "float8_tensorwise": "the budget of 10 s ran out",
    }
    said = answer(diagnose(Of(arms).facts(without_fp8())))
    assert said.numbers == "103.6 ms/step, measured"
    assert said.then.sentence == "The gain from FP8 is unknown: FP8 was not timed."


def test_what_fp8_would_give_is_said_once() -> None:
    """Round by round 0.50, by the two times that are shown 0.40."""
    arms: dict[str, tuple[float, ...] | str] = {
        "as_is": (100.0,) * 5,
        "bf16_compiled": (80.0, 80.0, 80.0, 100.0, 125.0),
        "float8_tensorwise": (160.0, 200.0, 200.0, 200.0, 250.0),
    }
    report = diagnose(Of(arms).facts(without_fp8()))
    assert "200.0 ms, 0.40x the speed of its best BF16 (80.0 ms)" in report.verdict.summary
    assert answer(report).then.sentence == "FP8 would run at 0.40x the speed of the best BF16, measured."


def in_rowwise(*, compiled: bool) -> Document:
    """The decoder in a recipe whose casts cost more than its matmuls save, by the cost model."""
    network = DECODER_468M.network
    linears = tuple(
        replace(each, recipe="rowwise", compiled="block" if compiled else None)
        if each.use == "training"
        else each
        for each in network.linears
    )
    blocks = tuple(replace(each, compiled=each.count if compiled else 0) for each in network.blocks)
    return diagnose(
        replace(
            DECODER_468M,
            assumed_gpu="H100",
            network=replace(network, linears=linears, blocks=blocks),
        )
    )


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [True, False])
def test_fp8_that_the_cost_model_expects_to_lose_is_left_off(compiled: bool) -> None:
    """Also if compiling it makes it faster, as long as it still loses."""
    said = answer(in_rowwise(compiled=compiled))
    assert said.fix == ("Go back to BF16, compiled: FP8 would be slower here (estimated).",)
    gain = "1.53x" if compiled else "4.8x"
    assert said.then.sentence.startswith(f"About {gain} faster than now")


@pytest.mark.slow
def test_a_made_up_batch_gives_no_fp8_up() -> None:
    facts = in_rowwise(compiled=False).facts
    said = answer(diagnose(replace(facts, workload=replace(facts.workload, batch_source="made up"))))
    assert said.fix == ("Compile block by block, after the conversion to FP8.",)
    assert said.then.sentence.endswith("; a larger batch may pay.")


def test_a_fix_that_bf16_needs_too_stands_beside_leaving_fp8_off() -> None:
    said = answer(load_report(RECORDED / "h200-te_checkpointed_inside.json.gz"))
    assert said.fix[:2] == (
        "1. Go back to BF16: with every fix it takes 11.5 ms, and the fastest FP8 that was timed takes 14.2 "
        "ms.",
        "2. Keep the activations.",
    )
    assert said.then.sentence == "11.5 ms in BF16 without checkpointing, 2.6x faster than now."


@pytest.mark.parametrize(
    ("recording", "doubt"),
    [
        (
            "te_tiny",
            "the step waits for the host, and Python ran 1.8 times as long as at its best",
        ),
        ("busy_neighbours", "two copies of one step differ by 3.7%"),
        ("decoder_468m", None),
    ],
)
def test_times_that_are_not_reliable_leave_the_size_open(recording: str, doubt: str | None) -> None:
    sure = certainty(load_report(RECORDED / f"h200-{recording}.json.gz"))
    assert sure.startswith("Slower: yes. How much: no, " if doubt else "Yes: ")
    assert doubt is None or f" rounds: {doubt}" in sure


UNCOPIED = "copying it raises TypeError: cannot pickle '_io.TextIOWrapper' object"


@pytest.mark.parametrize("facts", [DECODER_468M, without_fp8(), UNALIGNED], ids=["slow", "no FP8", "raises"])
def test_why_copies_could_not_be_timed_is_said_once(facts: Facts) -> None:
    trial = Trial(device="cuda", gpu="NVIDIA H200", arms=(), reliable=False, reason=UNCOPIED)
    said = answer(diagnose(replace(facts, trial=trial)))
    assert " ".join((*said.why, said.sure)).count(UNCOPIED) == 1


@pytest.mark.slow
def test_what_raises_by_rule_was_not_seen_to_raise_in_the_step_that_a_cpu_ran() -> None:
    report = diagnose(timed(UNALIGNED, ran("as_is", 878.4), ran("bf16", 241.3), device="cpu"))
    assert report.verdict.status == "step_raises"
    assert certainty(report) == (
        "The fault: yes, it was read from the job itself. Faster or slower: not known, FP8 was not compared "
        "with BF16."
    )


def test_a_step_whose_parts_are_shown_is_not_called_unprofiled() -> None:
    report = diagnose(timed(DECODER_468M, FP8_EAGER, failed("bf16", "it raises"), device="cpu"))
    assert report.verdict.status == "not_measured"
    assert answer(report).why == (
        "BF16 was not timed, so there is nothing to compare with.",
        "168 of 168 FP8 Linears are not compiled.",
    )


def test_a_step_that_raises_by_itself_is_not_told_to_change_nothing() -> None:
    raises = Trial(
        device="cuda",
        gpu="NVIDIA H200",
        arms=(),
        reliable=False,
        why=Reason.STEP_RAISES,
        reason="the training step raises RuntimeError: shapes do not match",
    )
    said = answer(diagnose(replace(without_fp8(), trial=raises)))
    assert said.what == "The training step raises"
    assert said.fix == ("Fix the exception, then run fp8doctor again.",)


@pytest.mark.parametrize(
    "facts",
    [
        timed(
            without_fp8(), ran("as_is", 224.8), ran("bf16_compiled", 174.9), ran("float8_tensorwise", 158.0)
        ),
        timed(without_fp8(), ran("as_is", 224.8), ran("bf16_compiled", 174.9)),
        timed(UNALIGNED, ran("as_is", 878.4), ran("bf16", 241.3)),
        timed(DECODER_468M, ran("as_is", 878.4), ran("bf16", 241.3)),
    ],
    ids=["no FP8", "no FP8 timed", "raises", "slow"],
)
def test_no_time_of_a_cpu_stands_without_its_name(facts: Facts) -> None:
    said = answer(diagnose(replace(facts, trial=replace(facts.trial, device="cpu", gpu=None))))
    assert said.numbers.endswith("measured on the CPU")
    if said.then.basis == "measured":
        assert said.then.sentence.endswith(", measured on the CPU, which does not predict a GPU.")


def routed(*, compiled: bool) -> Document:
    """Experts of torchao's Float8Linear, whose rows a router decides and a forward could not count."""
    facts = in_rowwise(compiled=compiled).facts
    linears = tuple(
        replace(each, role="experts", gemms=1, recipe="tensorwise") if each.use == "training" else each
        for each in facts.network.linears
    )
    workload = replace(facts.workload, batch_source="given")
    return diagnose(replace(facts, network=replace(facts.network, linears=linears), workload=workload))


@pytest.mark.slow
def test_what_could_make_the_step_raise_stands_in_the_box() -> None:
    (fix,) = answer(routed(compiled=True)).fix
    assert fix.startswith("No check found anything to change. Open: does the step fail on a GPU? Unknown: ")
    assert "whether each expert's " in fix
    assert "are a multiple of 16: fp8doctor found no router that decides them; " in fix
    assert "its speed and its numerics. Time it on a GPU: fp8doctor decoder.py" in fix
    assert answer(routed(compiled=False)).fix[-1].startswith("Open: does the step fail on a GPU?")


@pytest.mark.nightly
def test_an_upper_bound_is_not_called_measured() -> None:
    bounds = [said for path in RECORDINGS if (said := answer(load_report(path)).limit)]
    assert bounds
    assert all(
        re.fullmatch(r"Upper bound: [\d.]+x BF16, if FP8 changed only the matmuls \(.+\)\.", each)
        for each in bounds
    )


def test_a_plan_that_bf16_gains_from_too_has_no_upper_bound_beside_it() -> None:
    report = load_report(RECORDED / "h200-lora.json.gz")
    assert that_help_bf16_too(step.treatment.name for step in report.prescription)
    assert answer(report).limit == ""


def test_micro_batches_of_a_step_are_named() -> None:
    facts = load_report(RECORDED / "h200-decoder_468m_compiled.json.gz").facts
    twice = replace(facts, workload=replace(facts.workload, accumulate=2))
    assert "tokens in each of 2 micro-batches" in model(twice)
    assert "micro-batch" not in model(facts)


def test_the_autocast_of_a_trainer_is_told() -> None:
    facts = load_report(RECORDED / "h200-decoder_468m_compiled.json.gz").facts
    inside = replace(facts, training=replace(facts.training, autocast="bfloat16"))
    assert "no autocast" in for_support(facts)
    assert "autocast to bfloat16" in for_support(inside)


def test_an_open_check_that_could_mean_a_broken_job_is_in_the_box() -> None:
    """Also under a plan, and beside a time: neither says whether the layers learn."""
    unknown = replace(DECODER_468M.training, parameters_outside_optimizer=NOT_RECORDED)
    said = answer(diagnose(replace(DECODER_468M, training=unknown)))
    too_old = "The older version that wrote this report did not check; make a new one: fp8doctor decoder.py"
    assert said.fix[-1] == f"Open: do the layers learn? {too_old}"
    assert not any("Open: " in each for each in answer(diagnose(DECODER_468M)).fix)


def test_a_live_model_is_told_how_to_time_it() -> None:
    live = replace(DECODER_468M, target=replace(DECODER_468M.target, kind="live"))
    compiled = tuple(replace(each, compiled="") for each in live.network.linears)
    network = replace(live.network, linears=compiled, blocks=())
    told = answer(diagnose(replace(live, network=network))).fix[0]
    assert told.endswith("Time it on a GPU: call inspect_model there.")


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("nf4_base", "FP8 training is combined with 14 Linears with quantized weights"),
        ("moe", "FP8 is about 5.5x slower than BF16"),
        ("emulated", "8 of 8 FP8 layers emulate FP8"),
        ("fp32_weights", "121 of 121 Linears are fp32, and no autocast is on"),
        ("te_checkpointed", "8 Transformer Engine layers are not recomputed in FP8"),
    ],
)
def test_the_title_carries_the_answer_that_is_known_without_a_trial(name: str, what: str) -> None:
    assert answer(load_report(RECORDED / f"h200-{name}.json.gz")).what == what


@pytest.mark.parametrize("name", ["te_lora_prepared", "nf4_base", "hidden_te", "cannot_be_saved"])
def test_no_error_is_outside_of_the_box(name: str) -> None:
    report = load_report(RECORDED / f"h200-{name}.json.gz")
    errors = {each.code for each in report.findings if each.severity == "error"}
    assert errors
    assert errors <= answer(report).causes


@pytest.mark.parametrize("name", ["emulated", "nf4_base", "te_checkpointed", "te_lora_prepared"])
def test_a_screen_whose_exit_code_is_1_has_the_mark_of_an_error(name: str) -> None:
    report = load_report(RECORDED / f"h200-{name}.json.gz")
    assert report.reaches("error")
    assert answer(report).tone == "bad"


def test_a_fix_of_a_nan_that_the_timed_step_lacks_is_called_untried() -> None:
    then = answer(load_report(RECORDED / "h200-static_scale.json.gz")).then.sentence
    assert then.startswith("With fix 2 alone: 53.8 ms")
    assert then.endswith(
        "Loss and gradients were finite in its steps. Do fix 1 too: it removes the cause, and was not timed."
    )


@pytest.mark.parametrize("bf16_ms", [60.0, 200.0])
def test_a_time_of_a_cpu_is_no_verdict_on_a_gpu(bf16_ms: float) -> None:
    """Neither a success nor a defect of its own."""
    arms = (ran("as_is", 100.0), ran("bf16", bf16_ms), ran("bf16_compiled", bf16_ms))
    report = diagnose(timed(DECODER_468M, *arms, device="cpu"))
    assert report.verdict.status in ("fp8_faster", "fp8_slower")
    assert headline(report, report.prescription)[0] == "plain"
    on_gpu = diagnose(timed(DECODER_468M, *arms))
    assert headline(on_gpu, on_gpu.prescription)[0] != "plain"
