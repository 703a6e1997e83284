"""MEM004 on real transformers models and torch's own attention, and its treatments timed in a trial on the
CPU."""

from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import nn
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
)

from fp8doctor.facts import Arm, ArmCut, Breakdown, KernelGroup, Package, Software
from fp8doctor.finding import Finding
from fp8doctor.profiling.kernel_families import classify
from tests.checks.arms import ran, timed
from tests.checks.rules import Look, found_by, outcome_of
from tests.examine.models import SIZES, llama, lora

SLOW = "slow-attention-backend"


def treated(model: nn.Module, look: Look) -> Finding:
    """What it says of the model, whose printed lines make it silent."""
    finding = found_by(SLOW, look(model))
    exec(finding.treatment.code, {"model": model, "torch": torch})
    assert outcome_of(SLOW, look(model)) == "silent"
    return finding


def test_eager_attention_of_a_class_that_has_sdpa(look: Look) -> None:
    assert treated(llama(attn_implementation="eager"), look).evidence["eager"] == ("the model",)
    treated(lora(llama(attn_implementation="eager")), look)


def test_the_module_that_has_the_configuration_is_named(look: Look) -> None:
    two = {"num_hidden_layers": 2}
    vision = {"model_type": "clip_vision_model", **two}
    config = LlavaConfig(text_config={"model_type": "llama", **two}, vision_config=vision)
    with torch.device("meta"):
        model = LlavaForConditionalGeneration(config)
    model.set_attn_implementation({"text_config": "eager"})
    assert treated(model, look).evidence["eager"] == ("model.language_model",)


def gemma2(**settings: Any) -> nn.Module:
    with torch.device("meta"):
        return Gemma2ForCausalLM(Gemma2Config(**SIZES, head_dim=16, **settings))


def test_eager_attention_that_is_needed(look: Look) -> None:
    softcapped, plain = gemma2(), gemma2(attn_logit_softcapping=None)
    for model in (softcapped, plain, llama(attn_implementation="eager", output_attentions=True)):
        assert outcome_of(SLOW, look(model)) == "not_applicable"


def test_torchs_attention_is_healthy(look: Look) -> None:
    """Looking creates no context."""
    assert outcome_of(SLOW, look(llama())) == "silent"
    assert outcome_of(SLOW, look(nn.Sequential(nn.Linear(32, 32)))) == "not_applicable"
    assert not torch.cuda.is_initialized()


def profiled(*groups: Any, reliable: bool = True) -> Arm:
    """The step as a trial on a GPU would have profiled it: 100 ms, 10 ms at the deepest cut."""
    kernels = tuple(
        KernelGroup(
            name=name, family=classify(name, operator, inside=inside), operator=operator, count=12, time_ms=ms
        )
        for name, operator, ms, inside in ((*group, None)[:4] for group in groups)
    )
    parts = Breakdown(families_ms={"gemm_16bit": 5.0}, reliable=reliable, busy_ms=100.0, groups=kernels)
    return ran("as_is", cuts=(ArmCut(step_ms=4.0), ArmCut(step_ms=10.0)), breakdown=parts)


BMM = ("nvjet_sm90_tst_64x64_4x4_bz_TNN", "aten::bmm", 1.0)
EAGER = ("cunn_SoftMaxForward<float, 4>", "aten::_softmax", 0.6)
COMPILED = ("triton_per_fused__softmax_add_3", None, 0.6)
FUSED = (
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7",
    "aten::_cudnn_attention_forward",
    1.2,
)
LOSS = ("triton_red_fused__log_softmax_nll_loss_7", None, 3.0)


@pytest.mark.parametrize("softmax", [EAGER, COMPILED], ids=["eager", "compiled"])
def test_kernels_of_a_step_show_what_no_configuration_tells(look: Look, softmax: Any) -> None:
    finding = found_by(SLOW, timed(look(nn.Linear(64, 192)), profiled(BMM, softmax, LOSS)))
    assert (finding.evidence["unfused_ms"], finding.evidence["share_pct"]) == pytest.approx((1.6, 16.0))
    names = dict.fromkeys(("query", "key", "value"), torch.ones(1, 8, 64)) | {"torch": torch}
    exec(finding.treatment.code, names)
    assert "output" in names


@pytest.mark.parametrize(
    "arm",
    [
        profiled(BMM, LOSS),
        profiled(EAGER),
        profiled(("nvjet_experts", "aten::bmm", 5.0), ("cunn_SoftMax", "aten::_softmax", 0.04), FUSED),
        profiled(BMM, EAGER, reliable=False),
        profiled(("gemm", "aten::bmm", 0.5), ("softmax", "aten::_softmax", 0.1)),
        ran("as_is", cuts=(ArmCut(step_ms=10.0),)),
    ],
    ids=["a loss", "a router", "experts", "unreliable", "not a tenth", "not recorded"],
)
def test_kernels_that_prove_nothing(look: Look, arm: Arm) -> None:
    assert outcome_of(SLOW, timed(look(llama()), arm)) == "silent"
    assert outcome_of(SLOW, timed(look(llama()), profiled(BMM, EAGER), device="cpu")) == "silent"


MATH = (
    ("sm80_xmma_gemm_f32f32_f32f32_f32_nn_n_tilesize64x64x8", "aten::bmm", 1.36, "attention"),
    ("void (anonymous namespace)::softmax_warp_backward<float>", "aten::_softmax_backward_data", 0.17),
    ("void at::native::elementwise_kernel<128, 4, CUDAFunctor_add<float>>", "aten::add_", 0.3, "attention"),
    FUSED,
)
"""T5's attention on an H200, eager, a tenth of its ms: self-attention takes torch's math backend,
cross-attention cuDNN."""


@pytest.mark.parametrize(
    ("version", "name"), [("5.17.0", "contiguous-position-bias"), ("5.20.0", "call-fused-attention")]
)
def test_torchs_attention_that_falls_back_beside_one_that_is_fused(
    look: Look, version: str, name: str
) -> None:
    with torch.device("meta"):
        facts = look(T5ForConditionalGeneration(T5Config(num_layers=1, use_cache=False)))
    packages = {"transformers": Package(version=version, imported=True)}
    facts = replace(facts, software=Software(packages=packages))
    finding = found_by(SLOW, timed(facts, profiled(*MATH)))
    assert finding.evidence["share_pct"] == pytest.approx(18.3)
    assert finding.treatment.name == name
    assert outcome_of(SLOW, timed(facts, profiled(FUSED))) == "silent", "treated"
