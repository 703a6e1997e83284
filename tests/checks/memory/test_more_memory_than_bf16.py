"""MEM001: causes from real torchao, PEFT and (stand-in) TE models, peaks as they were measured on an H200."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torchao.float8 import convert_to_float8_training

from fp8doctor import load_report
from fp8doctor.checks.memory.more_memory_than_bf16 import more_memory_than_bf16
from fp8doctor.facts import Arm, Facts, Gpu, MemoryParts
from fp8doctor.facts.unrecorded import NOT_RECORDED
from fp8doctor.finding import Finding, NotApplicable
from tests.checks.arms import failed, ran, timed
from tests.stand_ins import transformer_engine
from tests.test_recorded import RECORDED

Look = Callable[..., Facts]


def in_fp8() -> nn.Module:
    return convert_to_float8_training(
        nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)).bfloat16()
    )


def with_lora() -> nn.Module:
    return get_peft_model(in_fp8(), LoraConfig(r=16, target_modules=["0", "2"]))


def peaks(as_is: float, bf16: float, compiled: float, graphs_run: int = 0) -> tuple[Arm, ...]:
    now = ran("as_is", peak_gib=as_is, static_gib=5.0, graphs_run=graphs_run)
    return (
        now,
        ran("bf16", peak_gib=bf16, static_gib=5.0),
        ran("bf16_compiled", peak_gib=compiled, static_gib=5.0),
    )


def test_frozen_layers_keep_their_inputs(look: Look) -> None:
    finding = more_memory_than_bf16(timed(look(with_lora(), tokens=4096), *peaks(38.4, 35.4, 29.5)))
    assert isinstance(finding, Finding)
    assert finding.title == "FP8 takes 3.0 GiB more than BF16"
    assert (finding.evidence["compared_with"], finding.evidence["frozen_eager_linears"]) == ("bf16", 2)
    assert (finding.evidence["extra_static_gib"], finding.evidence["extra_in_the_step_gib"]) == (
        0.0,
        pytest.approx(3.0),
    )
    assert "2 frozen torchao layers keep their input" in finding.explanation


def test_torchao_keeps_the_input_of_a_frozen_layer_and_bf16_does_not() -> None:
    def kept(layer: nn.Module) -> int:
        shapes = []
        x = torch.ones(32, 64, dtype=torch.bfloat16, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: shapes.append(tensor.shape) or tensor, lambda tensor: tensor
        ):
            layer.requires_grad_(False)(x)
        return shapes.count(x.shape)

    linear = nn.Linear(64, 48, bias=False).bfloat16()
    assert kept(linear) == 0
    assert kept(convert_to_float8_training(nn.Sequential(linear))) == 1


def test_compiling_treats_it(look: Look) -> None:
    model = with_lora()
    finding = more_memory_than_bf16(timed(look(model, tokens=4096), *peaks(38.4, 35.4, 29.5)))
    assert isinstance(finding, Finding)
    assert finding.treatment is not None
    exec(finding.treatment.code, {"model": model})
    assert (
        more_memory_than_bf16(timed(look(model, tokens=4096), *peaks(29.5, 35.4, 29.5, graphs_run=16)))
        is None
    )


def test_like_is_compared_with_like(look: Look) -> None:
    """A mark alone does not make a step compiled: the graphs that ran do."""
    model = in_fp8()
    model.compile()
    arms = peaks(24.7, 24.7, 21.7)
    assert more_memory_than_bf16(timed(look(model, tokens=4096), *arms)) is None
    finding = more_memory_than_bf16(timed(look(model, tokens=4096), *peaks(24.7, 24.7, 21.7, graphs_run=4)))
    assert isinstance(finding, Finding)
    assert finding.evidence["compared_with"] == "bf16_compiled"
    assert finding.treatment is None, "the cause is not known"
    own = ran("bf16_as_compiled", peak_gib=24.7, graphs_run=4)
    like_it = timed(look(model, tokens=4096), *peaks(24.7, 24.7, 21.7, graphs_run=4), own)
    assert more_memory_than_bf16(like_it) is None


def made_of(arm: Arm, **parts: float) -> Arm:
    """The arm with the parts of its peak as a trial on a GPU counts them."""
    kept = {"weights": 1.0, "fp8_copies": 0.0, "gradients": 1.0, "optimizer": 3.0} | parts
    rest = (arm.peak_gib or 0.0) - sum(kept.values())
    return msgspec.structs.replace(
        arm, memory=MemoryParts(**{f"{name}_gib": gib for name, gib in kept.items()}, activations_gib=rest)
    )


def test_the_evidence_says_where_the_extra_is(look: Look) -> None:
    as_is, bf16, compiled = peaks(24.0, 20.0, 18.0)
    arms = (made_of(as_is, fp8_copies=1.5, gradients=0.8, weights=1.02), made_of(bf16), compiled)
    finding = more_memory_than_bf16(timed(look(in_fp8(), tokens=4096), *arms))
    assert isinstance(finding, Finding)
    extra = {
        key.removeprefix("extra_").removesuffix("_gib"): value
        for key, value in finding.evidence.items()
        if key in EXTRA
    }
    assert list(extra) == ["activations", "fp8_copies", "weights", "optimizer", "gradients"], (
        "the largest first"
    )
    assert sum(extra.values()) == pytest.approx(finding.evidence["extra_gib"])
    assert (finding.evidence["as_is_fp8_copies_gib"], finding.evidence["bf16_fp8_copies_gib"]) == (1.5, 0.0)
    assert (
        "The difference: +2.7 GiB activations and temporaries, +1.5 GiB FP8 copies of weights, "
        "-0.2 GiB gradients." in finding.explanation
    )


EXTRA = [f"extra_{name}_gib" for name in ("weights", "fp8_copies", "gradients", "optimizer", "activations")]


@pytest.mark.parametrize("memory", [None, NOT_RECORDED], ids=["a CPU", "a recording from before"])
def test_without_the_parts_it_says_what_it_said(look: Look, memory: None) -> None:
    arms = peaks(24.0, 20.0, 18.0)
    finding = more_memory_than_bf16(
        timed(look(in_fp8(), tokens=4096), *(msgspec.structs.replace(arm, memory=memory) for arm in arms))
    )
    assert isinstance(finding, Finding)
    assert not set(EXTRA) & set(finding.evidence)
    assert "0.0 GiB are weights, buffers and optimizer state" in finding.explanation


@pytest.mark.parametrize(
    ("capability", "gib"), [("9.0", 2.0), ("8.9", 2.0), ("10.0", 1.0), ("12.0", 2.0), ("12.1", 2.0)]
)
def test_transformer_engine_holds_fp8_copies(
    look: Look, monkeypatch: pytest.MonkeyPatch, capability: str, gib: float
) -> None:
    transformer_engine.install(monkeypatch)
    with torch.device("meta"):
        model = nn.Sequential(transformer_engine.Linear(32768, 32768, bias=False))
    facts = msgspec.structs.replace(
        look(model, tokens=4096), gpus=(Gpu(visible=True, compute_capability=capability),)
    )
    finding = more_memory_than_bf16(timed(facts, *peaks(22.8, 19.9, 18.9)))
    assert isinstance(finding, Finding)
    assert finding.evidence["fp8_copies_gib"] == gib
    assert finding.treatment is None, "FP8 weights would take fp32 master weights, which is more"
    model[0].primary_weights_in_fp8 = True  # what that context leaves on a module
    stored = msgspec.structs.replace(look(model, tokens=4096), gpus=facts.gpus)
    assert more_memory_than_bf16(timed(stored, *peaks(19.9, 19.9, 18.9))) is None


def of_te(look: Look, monkeypatch: pytest.MonkeyPatch, *, frozen: bool, optimizer_gib: float) -> Finding:
    """What MEM001 says of one layer of 1 Gi parameters, with so much optimizer state."""
    transformer_engine.install(monkeypatch)
    with torch.device("meta"):
        model = nn.Sequential(transformer_engine.Linear(32768, 32768, bias=False))
    model.requires_grad_(not frozen)
    as_is, bf16, compiled = peaks(42.8, 29.9, 28.9)
    facts = look(model, tokens=4096)
    training = msgspec.structs.replace(facts.training, optimizer="torch.optim.adamw.AdamW")
    facts = msgspec.structs.replace(facts, training=training)
    arms = (made_of(as_is, optimizer=optimizer_gib), made_of(bf16), compiled)
    finding = more_memory_than_bf16(timed(facts, *arms))
    assert isinstance(finding, Finding)
    return finding


def test_fp8_weights_that_are_trained_come_with_their_master_weights(
    look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed = of_te(look, monkeypatch, frozen=False, optimizer_gib=12.0).treatment
    assert printed is not None
    for needed in (
        "preserve_high_precision_init_val=True",
        "get_high_precision_init_val()",
        "te.optimizers.FusedAdam(trained, master_weights=True, **settings)",
        'set_scaled_state(parameter, "master_param"',
        "import transformer_engine.pytorch as te",
    ):
        assert needed in printed.code
    assert "stops learning" in printed.summary
    compile(printed.code, "printed", "exec")


@pytest.mark.parametrize("optimizer_gib", [4.0, 8.0], ids=["BF16 AdamW", "fp32 AdamW"])
def test_fp8_weights_are_no_fix_where_master_weights_come_on_top(
    look: Look, monkeypatch: pytest.MonkeyPatch, optimizer_gib: float
) -> None:
    finding = of_te(look, monkeypatch, frozen=False, optimizer_gib=optimizer_gib)
    assert finding.treatment is None
    assert "fp32 master weights" in finding.explanation


def test_frozen_weights_need_no_master_weights(look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    printed = of_te(look, monkeypatch, frozen=True, optimizer_gib=0.0).treatment
    assert printed is not None
    assert "quantized_model_init" in printed.code
    assert "FusedAdam" not in printed.code


@pytest.mark.parametrize("patient", ["te_llama_7b", "accelerate_te_wide", "te_fused", "te_transformer"])
def test_jobs_that_are_faster_in_fp8_are_not_told_to_rebuild_their_weights(patient: str) -> None:
    report = load_report(RECORDED / f"h200-{patient}.json.gz")
    assert report.verdict.status == "fp8_faster"
    assert "MEM001" in {each.code for each in report.findings}
    assert "fp8-weights" not in {step.treatment.name for step in report.prescription}


@pytest.mark.parametrize(
    ("as_is", "bf16"),
    [(14.6, 14.5), (12.3, 13.7), (0.12, 0.08), (20.9, 20.0)],
    ids=["eager on an H200", "less", "workspaces of a small model", "4.5%"],
)
def test_ordinary_differences(look: Look, as_is: float, bf16: float) -> None:
    assert more_memory_than_bf16(timed(look(in_fp8(), tokens=4096), *peaks(as_is, bf16, bf16))) is None


@pytest.mark.parametrize(
    "arms",
    [
        (ran("as_is", peak_gib=None), ran("bf16", peak_gib=None)),
        (failed("as_is", "no FP8 GEMM was seen in its step"), ran("bf16", peak_gib=4.0)),
        (ran("as_is", peak_gib=8.0), failed("bf16", "there is no BF16 form of LayerNormMLP yet")),
    ],
    ids=["a CPU", "not run", "no BF16"],
)
def test_without_both_peaks_there_is_no_answer(look: Look, arms: tuple[Arm, ...]) -> None:
    assert isinstance(more_memory_than_bf16(timed(look(in_fp8(), tokens=4096), *arms)), NotApplicable)


def test_bf16_takes_what_bf16_takes(look: Look) -> None:
    assert isinstance(
        more_memory_than_bf16(
            timed(look(nn.Sequential(nn.Linear(64, 64)), tokens=4096), *peaks(9.0, 8.0, 8.0))
        ),
        NotApplicable,
    )


@pytest.mark.parametrize(
    "patient", ["decoder_468m", "decoder_468m_compiled", "llama_8b_float8", "te_autocast", "accelerate_te"]
)
def test_healthy_recordings(patient: str) -> None:
    report = load_report(RECORDED / f"h200-{patient}.json.gz")
    assert next(each.outcome for each in report.outcomes if each.code == "MEM001") == "healthy"


def test_the_lora_that_was_recorded_leaves_the_cure_to_its_cause() -> None:
    report = load_report(RECORDED / "h200-lora.json.gz")
    finding = next(each for each in report.findings if each.code == "MEM001")
    assert finding.evidence["extra_gib"] == pytest.approx(2.97, abs=0.01)
    assert "CMP001" in [step.code for step in report.prescription]
    assert not any("MEM001" in step.mends for step in report.prescription)
