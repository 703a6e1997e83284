"""The verdict that a trial allows, from arms written down by hand."""

from __future__ import annotations

import re

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fp8doctor import inspect_model, load_report
from fp8doctor.analysis.arms import best_bf16, ratio, saved_ms
from fp8doctor.analysis.noise import is_noise, swallows_effect
from fp8doctor.analysis.significance import is_decided
from fp8doctor.cli.gate import Gate
from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.diagnosis.outlook import outlook
from fp8doctor.facts import Arm, Facts, Linear, Observation, Trial, recorded
from fp8doctor.facts.arm_names import Reason
from tests.diagnosis.trials import SLOW, Of, around, render, without_fp8
from tests.facts_of import DECODER_468M
from tests.test_recorded import RECORDED


def test_quantization_aware_training_is_named() -> None:
    from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, PerRow, quantize_
    from torchao.quantization.qat import QATConfig

    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32)).bfloat16()
    quantize_(
        model, QATConfig(Float8DynamicActivationFloat8WeightConfig(granularity=PerRow()), step="prepare")
    )
    told = inspect_model(model, torch.ones(16, 32, dtype=torch.bfloat16), trial=False).verdict
    assert told.status == "no_fp8"


def test_fp8_weights_that_multiply_in_the_forward_alone_are_told_so() -> None:
    from transformers.integrations.finegrained_fp8 import FP8Linear

    model = nn.Sequential(FP8Linear(128, 128, block_size=(128, 128)), nn.Linear(128, 128))
    told = inspect_model(model, torch.ones(16, 128), trial=False).verdict
    _said, estimate = told.summary.split(" Estimated ")
    assert "with BF16 weights (" in estimate


def test_layers_that_multiply_in_the_forward_are_not_said_to_store_only() -> None:
    from torchao.quantization import Float8WeightOnlyConfig, quantize_
    from transformers.integrations.finegrained_fp8 import FP8Linear

    stored = nn.Sequential(nn.Linear(128, 128))
    quantize_(stored, Float8WeightOnlyConfig(set_inductor_config=False))
    model = nn.Sequential(FP8Linear(128, 128, block_size=(128, 128)), stored, nn.Linear(128, 128))
    report = inspect_model(model, torch.ones(16, 128), trial=False)
    told = "1 of 3 Linears multiply in FP8 only in the forward; in 1 more only the weights are in"
    assert next(each.title for each in report.findings if each.code == "MOD003") == f"{told} FP8"


IN_THE_FORWARD = {
    "torchao": Linear(stack="torchao", features={"activations_quantized": True}),
    "huggingface": Linear(
        stack="huggingface", kind="transformers.integrations.finegrained_fp8.FP8Linear", features={}
    ),
}
"""Layers with FP8 weights that multiply in FP8, in the forward alone."""

WEIGHTS_ONLY = {
    "torchao": Linear(stack="torchao", features={"activations_quantized": False}),
    "torch": Linear(stack="torch", features={}),
}
"""Layers with FP8 weights that are converted back before each use."""


def of_fp8_weights(stored: Linear, gemms: int) -> Facts:
    """Facts of a watched script whose Linears are all like this one; 0 is no FP8 GEMM in its step."""
    facts = without_fp8()
    known = {name: getattr(stored, name) for name in ("stack", "features", "kind") if recorded(stored, name)}
    linears = tuple(
        msgspec.structs.replace(each, use="storage", dtype="float8_e4m3fn", **known)
        for each in facts.network.linears
    )
    network = msgspec.structs.replace(facts.network, linears=linears)
    return msgspec.structs.replace(
        facts, network=network, observed=Observation(steps_ms=(28.8,), clock="cuda", fp8_gemms=gemms)
    )


@pytest.mark.parametrize("stack", IN_THE_FORWARD)
def test_fp8_gemms_of_a_forward_in_fp8_are_no_layer_of_an_unknown_library(stack: str) -> None:
    told = diagnose(of_fp8_weights(IN_THE_FORWARD[stack], 28)).verdict
    assert told.status == "no_fp8"
    without = diagnose(of_fp8_weights(IN_THE_FORWARD[stack], 0)).verdict
    _said, estimate = without.summary.split(" Estimated ")
    assert "with BF16 weights (" in estimate


@pytest.mark.parametrize("stack", WEIGHTS_ONLY)
def test_fp8_gemms_beside_weights_that_are_converted_back(stack: str) -> None:
    told = diagnose(of_fp8_weights(WEIGHTS_ONLY[stack], 28)).verdict
    assert told.status == "not_measured"


def test_fp8_gemms_of_nobody_known() -> None:
    seen = Observation(steps_ms=(28.8,), clock="cuda", fp8_gemms=28)
    told = diagnose(msgspec.structs.replace(without_fp8(), observed=seen)).verdict
    assert told.status == "not_measured"


def test_a_trial_of_fp8_weights_does_not_say_that_nothing_is_in_fp8() -> None:
    arms: dict[str, tuple[float, ...] | str] = {
        "as_is": around(103.6),
        "bf16_compiled": around(92.7),
        "float8_tensorwise": around(80.0),
    }
    for stored in (IN_THE_FORWARD["torchao"], WEIGHTS_ONLY["torchao"]):
        told = diagnose(Of(arms).facts(of_fp8_weights(stored, 0))).verdict
        assert told.status == "no_fp8"
        assert told.achievable_speedup == pytest.approx(92.7 / 80.0, abs=0.002)


def test_the_founding_case() -> None:
    report = diagnose(Of(SLOW).facts())
    verdict = report.verdict
    assert (verdict.status, verdict.basis) == ("fp8_slower", "measured")
    assert verdict.speedup == pytest.approx(0.253, abs=0.001)
    assert verdict.speedup_low is not None
    assert verdict.speedup_high is not None
    assert verdict.speedup_low < verdict.speedup < verdict.speedup_high  # type: ignore[operator]
    assert verdict.achievable_speedup == pytest.approx(1.05, abs=0.001)
    assert verdict.tokens_per_s == pytest.approx(16384 / 0.3661, rel=1e-6)
    assert report.reaches("error")


@pytest.mark.parametrize(
    ("as_is", "status"),
    [
        (around(92.7), "fp8_even"),
        (around(90.5), "fp8_even"),
        (around(93.0, spread=2.0), "fp8_even"),
        (around(80.0, spread=20.0), "too_noisy"),
        (around(92.7, spread=20.0), "too_noisy"),
        (around(85.0), "fp8_faster"),
        (around(99.0), "fp8_slower"),
    ],
    ids=[
        "equal",
        "within 3%",
        "interval holds 1",
        "effect swallowed",
        "open to both sides",
        "faster",
        "slower",
    ],
)
def test_the_status(as_is: tuple[float, ...], status: str) -> None:
    assert diagnose(Of({**SLOW, "as_is": as_is}).facts()).verdict.status == status


def test_a_timing_too_noisy_to_tell_gives_no_ratio() -> None:
    report = diagnose(Of({**SLOW, "as_is": around(80.0, spread=20.0), "prescribed": "not asked"}).facts())
    verdict = report.verdict
    assert (verdict.status, verdict.speedup, verdict.achievable_speedup) == ("too_noisy", None, None)
    assert (verdict.speedup_low, verdict.speedup_high) == pytest.approx((92.5 / 100, 92.5 / 60), rel=0.01)
    assert not re.search(r"\dx", verdict.summary)
    assert all(len(gate.missed(report)) == 1 for gate in (Gate(strict=True), Gate(min_speedup=1.1)))
    assert Gate().missed(report) == ()
    next(each for each in report.outcomes if each.code == "STP005")


@pytest.mark.parametrize(
    ("alike", "as_is", "status"),
    [
        (0.955, 97.0, "too_noisy"),
        (0.955, 93.0, "too_noisy"),
        (1.05, 97.0, "too_noisy"),
        (0.985, 97.0, "fp8_slower"),
        (0.955, 105.0, "fp8_slower"),
        (1.05, 80.0, "fp8_faster"),
    ],
)
def test_an_effect_no_larger_than_what_parts_a_step_from_its_copy_is_noise(
    alike: float, as_is: float, status: str
) -> None:
    facts = Of({**SLOW, "as_is": around(as_is), "prescribed": "not asked"}).facts()
    trial = msgspec.structs.replace(facts.trial, self_check_ratio=alike)
    verdict = diagnose(msgspec.structs.replace(facts, trial=trial)).verdict
    assert verdict.status == status
    assert (verdict.speedup is None) == (status == "too_noisy")


def test_what_fp8_would_give_is_not_told_from_noise() -> None:
    arms: dict[str, tuple[float, ...] | str] = {
        "as_is": around(103.6),
        "bf16_compiled": around(92.7),
        "float8_tensorwise": around(88.3, spread=20.0),
    }
    verdict = diagnose(Of(arms).facts(without_fp8())).verdict
    assert (verdict.status, verdict.achievable_speedup) == ("no_fp8", None)


TIMES = st.lists(st.floats(50.0, 150.0), min_size=5, max_size=15)


@pytest.mark.slow
@given(TIMES, TIMES, st.one_of(st.none(), st.floats(0.8, 1.25)))
def test_what_is_told_is_told_by_the_interval(
    in_bf16: list[float], in_fp8: list[float], alike: float | None
) -> None:
    bf16, fp8 = (
        Arm(name=name, tried=True, rounds_ms=tuple(ms)) for name, ms in (("bf16", in_bf16), ("as_is", in_fp8))
    )
    trial, speedup = Trial(device="cuda", self_check_ratio=alike), ratio(bf16, fp8)
    if is_noise(bf16, fp8, trial) and alike in (None, 1.0):
        assert speedup.low <= 1 <= speedup.high
        assert not is_decided(speedup)
    if swallows_effect(speedup):
        assert is_noise(bf16, fp8, trial)


def test_fp8_that_never_ran_is_an_error() -> None:
    report = diagnose(Of({**SLOW, "as_is": Reason.NO_FP8_GEMM}).facts())
    assert report.verdict.status == "fp8_not_engaged"
    assert report.reaches("error")


@pytest.mark.parametrize(
    ("arms", "sentence"),
    [
        (
            {"as_is": "the GPU's memory is too small for it"},
            "The step could not be timed: the GPU's memory is too small for it.",
        ),
        ({"as_is": around(90.0)}, "No BF16 baseline could be timed: it was not tried."),
    ],
)
def test_what_could_not_be_timed_is_not_measured(
    arms: dict[str, tuple[float, ...] | str], sentence: str
) -> None:
    verdict = diagnose(Of(arms, device="cpu").facts()).verdict
    assert verdict.status == "not_measured"
    assert sentence in verdict.summary


def alone(name: str) -> tuple[Facts, Facts]:
    """A recorded job, and the same with the times of its BF16 lost."""
    facts = load_report(RECORDED / f"h200-{name}.json.gz").facts
    arms = tuple(
        each if each.name == "as_is" else Of({}).arm(each.name, Reason.NO_TIME_LEFT)
        for each in facts.trial.arms
        if each.name in ("as_is", "bf16", "bf16_compiled")
    )
    return facts, msgspec.structs.replace(facts, trial=msgspec.structs.replace(facts.trial, arms=arms))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "status"), [("decoder_468m", "fp8_slower"), ("decoder_468m_compiled", "fp8_even")]
)
def test_a_bf16_that_was_not_timed_is_modelled_beside_the_step_that_was(name: str, status: str) -> None:
    """A modelled speedup near 1 is even: the model is not good enough to tell its sign."""
    known, lost = (diagnose(facts).verdict for facts in alone(name))
    assert (lost.status, lost.basis, lost.step_ms) == (status, "modelled", known.step_ms)
    assert lost.bf16_step_ms == pytest.approx(known.bf16_step_ms, rel=0.15)


@pytest.mark.parametrize(
    ("name", "basis"), [("decoder_468m_compiled", "modelled"), ("decoder_468m", "measured")]
)
def test_fp8_is_not_called_faster_than_a_bf16_that_a_compiled_one_may_beat(name: str, basis: str) -> None:
    """Seen on an H200: a GPT compiled whole, 1.00x of eager BF16, and 0.91x of BF16 compiled like it. FP8
    that eager BF16 beats already is slower, whatever was left out."""
    facts = load_report(RECORDED / f"h200-{name}.json.gz").facts
    arms = tuple(
        Of({}).arm(each.name, Reason.NO_TIME_LEFT) if each.name == "bf16_compiled" else each
        for each in facts.trial.arms
        if each.name in ("as_is", "bf16", "bf16_compiled")
    )
    lost = msgspec.structs.replace(facts, trial=msgspec.structs.replace(facts.trial, arms=arms))
    eager = next(each.step_ms for each in arms if each.name == "bf16")
    document = diagnose(lost)
    verdict = document.verdict
    assert verdict.basis == basis
    if basis == "modelled":
        assert verdict.bf16_step_ms is not None
        assert verdict.bf16_step_ms <= eager
        untimed = "compiled BF16, which may be faster, was not timed. To time it: fp8doctor --budget "
        assert untimed in outlook(document).sentence
    else:
        assert (verdict.status, verdict.bf16_step_ms) == ("fp8_slower", eager)


@pytest.mark.slow
def test_a_modelled_speedup_is_no_error_and_passes_no_gate() -> None:
    known, lost = (msgspec.structs.replace(diagnose(facts), findings=()) for facts in alone("decoder_468m"))
    assert (known.reaches("error"), lost.reaches("error")) == (True, False)
    gate = Gate(min_speedup=1.0)
    assert [bool(gate.missed(each)) for each in (known, lost)] == [True, True]


def test_bf16_of_another_gpu_is_not_modelled_beside_the_step() -> None:
    assumed = msgspec.structs.replace(alone("decoder_468m")[1], assumed_gpu="H100")
    assert diagnose(assumed).verdict.status == "not_measured"


def test_a_model_without_fp8_is_told_what_fp8_would_give() -> None:
    arms: dict[str, tuple[float, ...] | str] = {
        "as_is": around(103.6),
        "bf16_compiled": around(92.7),
        "float8_tensorwise": around(88.3),
        "float8_rowwise": around(122.6),
    }
    facts = Of(arms).facts(without_fp8())
    verdict = diagnose(facts).verdict
    assert verdict.status == "no_fp8"
    assert verdict.speedup is None
    assert verdict.achievable_speedup == pytest.approx(1.05, abs=0.001)
    best = best_bf16(facts)
    assert best is not None
    assert best.name == "bf16_compiled"


@pytest.mark.slow
def test_what_helps_bf16_too_is_not_counted_for_fp8() -> None:
    arms = {
        "as_is": around(107.8),
        "bf16": around(131.0),
        "bf16_compiled": around(119.6),
        "prescribed": around(93.2),
    }
    without = {**arms, "bf16_without_checkpointing": around(98.1)}
    verdict = diagnose(Of(without, treatments=("checkpointing-off",), bases={}).facts()).verdict
    assert verdict.achievable_speedup == pytest.approx(1.053, abs=0.002)
    too_large = {**arms, "bf16_without_checkpointing": Reason.DOES_NOT_FIT}
    verdict = diagnose(Of(too_large, treatments=("checkpointing-off",), bases={}).facts()).verdict
    assert verdict.achievable_speedup == pytest.approx(119.6 / 93.2, abs=0.002)
    graphs = {**arms, "bf16_cuda_graphs": around(95.0)}
    verdict = diagnose(Of(graphs, treatments=("cuda-graphs",), bases={}).facts()).verdict
    assert verdict.achievable_speedup == pytest.approx(95.0 / 93.2, abs=0.002)
    slower = {**arms, "bf16_cuda_graphs": around(121.0)}
    verdict = diagnose(Of(slower, treatments=("cuda-graphs",), bases={}).facts()).verdict
    assert verdict.achievable_speedup == pytest.approx(119.6 / 93.2, abs=0.002), "BF16 may do without them"
    unknown = diagnose(Of(arms, treatments=("adapters-to-bf16", "compile-blocks"), bases={}).facts()).verdict
    assert unknown.achievable_speedup is None


def test_where_bf16_with_the_same_graphs_is_faster_the_plan_gives_fp8_up() -> None:
    """FP8 that beats BF16 without them is no gain of FP8's."""
    arms = {
        "as_is": around(107.8),
        "bf16": around(131.0),
        "bf16_compiled": around(101.6),
        "prescribed": around(93.2),
        "bf16_cuda_graphs": around(85.0),
    }
    report = diagnose(Of(arms, treatments=("cuda-graphs",), bases={}).facts())
    last = report.prescription[-1].treatment
    assert last.name == "stay-in-bf16"
    assert 'mode="reduce-overhead"' in last.code
    assert ".compile()" not in last.code, "not in another form than the one that was timed"
    even = diagnose(
        Of({**arms, "bf16_cuda_graphs": around(99.0)}, treatments=("cuda-graphs",), bases={}).facts()
    )
    assert "stay-in-bf16" not in [step.treatment.name for step in even.prescription]


def test_fp8_that_was_asked_for_and_is_not_there_stays_so_when_the_model_was_timed() -> None:
    asked = msgspec.structs.replace(DECODER_468M.environment, variables={"ACCELERATE_MIXED_PRECISION": "fp8"})
    seen = msgspec.structs.replace(DECODER_468M.training, gradients_seen=True)
    base = msgspec.structs.replace(without_fp8(), environment=asked, training=seen)
    verdict = diagnose(Of({"as_is": around(103.6), "bf16_compiled": around(92.7)}).facts(base)).verdict
    assert verdict.status == "fp8_not_engaged"
    assert verdict.step_ms == 103.6


def test_the_faster_form_of_a_conversion_stands_and_says_which_it_is() -> None:
    arms: dict[str, tuple[float, ...] | str] = {
        "as_is": around(92.7),
        "float8_tensorwise": around(88.3),
        "float8_tensorwise_as_compiled": around(80.0),
    }
    report = diagnose(Of(arms).facts(without_fp8()))
    assert "\nFP8 tensorwise, your torch.compile" in render(report)


def test_arms_of_different_windows_are_compared_as_widely_as_both_allow() -> None:
    one = Arm(name="a", rounds_ms=(9.0, 10.0, 10.0, 10.0, 10.0, 11.0))
    other = Arm(name="b", rounds_ms=(19.0, 19.5, 20.0, 20.0, 20.0, 20.5, 21.0))
    compared = ratio(one, other)
    assert compared.median == 0.5
    assert compared.low <= 9 / 20.5
    assert compared.high >= 11 / 20


def test_windows_of_as_many_rounds_are_told_apart() -> None:
    steady = tuple(10.0 + 0.1 * number for number in range(6))
    one, later = Arm(name="a", rounds_ms=steady, window=1), Arm(name="b", rounds_ms=steady, window=2)
    beside = msgspec.structs.replace(later, window=1)
    assert ratio(one, beside).low == ratio(one, beside).high == 1
    assert saved_ms(one, beside).high == 0
    assert ratio(one, later).low < 1 < ratio(one, later).high
    assert saved_ms(one, later).low < 0 < saved_ms(one, later).high
