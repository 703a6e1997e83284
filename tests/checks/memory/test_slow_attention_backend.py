"""MEM004 on real transformers models and torch's own attention, and its treatments timed in a trial on the
CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
import transformers
from packaging.version import Version
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
)

from fp8doctor.analysis.trial_view import TrialView
from fp8doctor.checks.memory.slow_attention_backend import ASK_TORCH, CONTIGUOUS_BIAS, slow_attention_backend
from fp8doctor.diagnosis.savings import with_measured_savings
from fp8doctor.examine.attention import BACKENDS, sdp_backends
from fp8doctor.facts import Arm, ArmCut, Breakdown, Facts, Family, KernelGroup, Package, Software
from fp8doctor.finding import Finding, NotApplicable
from fp8doctor.profiling.kernel_families import classify
from fp8doctor.registry import discover, run, select
from fp8doctor.trial.planning import VariantPlanner
from fp8doctor.trial.treatments.apply import NotTried, TreatmentContext, function_of
from fp8doctor.trial.variant import Variant, VariantPlan
from tests.checks.arms import ran, timed
from tests.checks.trials import tried
from tests.examine.models import SIZES, llama, lora

Look = Callable[..., Facts]


def found(facts: Facts) -> Finding:
    finding = slow_attention_backend(facts)
    assert isinstance(finding, Finding)
    return finding


def reason(facts: Facts) -> str:
    answer = slow_attention_backend(facts)
    assert isinstance(answer, NotApplicable)
    return answer.reason


class Own(nn.Module):
    """A decoder's attention that calls torch's, or computes it by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(64, 192)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.proj(x).chunk(3, dim=-1)
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True)


class ByHand(Own):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.proj(x).chunk(3, dim=-1)
        return (query @ key.transpose(-1, -2)).softmax(-1) @ value


def test_eager_attention_of_a_class_that_has_sdpa(look: Look) -> None:
    model = llama(attn_implementation="eager")
    finding = found(look(model))
    assert finding.title == "Eager attention runs in LlamaForCausalLM instead of torch's fused kernels"
    assert finding.evidence["eager"] == ("the model",)
    assert finding.treatment is not None
    assert finding.treatment.name == "attention-sdpa"
    exec(finding.treatment.code, {"model": model})
    assert slow_attention_backend(look(model)) is None


def test_the_module_that_has_the_configuration_is_named(look: Look) -> None:
    two = {"num_hidden_layers": 2}
    with torch.device("meta"):
        model = LlavaForConditionalGeneration(
            LlavaConfig(
                text_config={"model_type": "llama", **two},
                vision_config={"model_type": "clip_vision_model", **two},
            )
        )
    assert slow_attention_backend(look(model)) is None
    model.set_attn_implementation({"text_config": "eager"})
    finding = found(look(model))
    assert (finding.title, finding.evidence["eager"]) == (
        "Eager attention runs in LlamaModel instead of torch's fused kernels",
        ("model.language_model",),
    )
    assert finding.treatment is not None
    exec(finding.treatment.code, {"model": model})
    assert slow_attention_backend(look(model)) is None


def test_behind_peft(look: Look) -> None:
    model = lora(llama(attn_implementation="eager"))
    finding = found(look(model))
    assert finding.treatment is not None
    exec(finding.treatment.code, {"model": model})
    assert slow_attention_backend(look(model)) is None


def gemma2(**settings: Any) -> nn.Module:
    with torch.device("meta"):
        return Gemma2ForCausalLM(Gemma2Config(**SIZES, head_dim=16, **settings))


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (gemma2, "attn_logit_softcapping=50.0"),
        (lambda: gemma2(attn_logit_softcapping=None), "transformers has no other for Gemma2ForCausalLM"),
        (lambda: llama(attn_implementation="eager", output_attentions=True), "output_attentions=True"),
    ],
    ids=["capped logits", "no other", "attentions are wanted"],
)
def test_eager_attention_that_is_needed(look: Look, build: Callable[[], nn.Module], expected: str) -> None:
    assert reason(look(build())) == f"attention must be eager here: {expected}"


def test_capped_logits_of_a_class_that_says_it_has_sdpa(look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    """So said Gemma 2 in transformers 4, and left the cap out."""
    monkeypatch.setattr(Gemma2ForCausalLM, "_supports_sdpa", True)
    assert "attn_logit_softcapping=50.0" in reason(look(gemma2(attn_implementation="eager")))


@pytest.mark.parametrize(
    "model", [llama, Own, lambda: nn.MultiheadAttention(64, 4)], ids=["transformers", "own", "torch"]
)
def test_torchs_attention_is_healthy_unless_only_math_is_left(
    look: Look, model: Callable[[], nn.Module]
) -> None:
    assert slow_attention_backend(look(model())) is None
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH]):
        assert slow_attention_backend(look(model())) is None, "a fused one is left"
    with sdpa_kernel([SDPBackend.MATH]):
        finding = found(look(model()))
        assert finding.explanation == "scaled_dot_product_attention can still use: math."
        assert finding.treatment is not None
        exec(finding.treatment.code, {"torch": torch})
        assert slow_attention_backend(look(model())) is None


def test_looking_at_the_backends_changes_none() -> None:
    assert sdp_backends() == BACKENDS
    with sdpa_kernel([SDPBackend.MATH]):
        assert sdp_backends() == ("math",)
    assert sdp_backends() == BACKENDS
    assert not torch.cuda.is_initialized()


def test_only_math_does_not_matter_to_what_never_asks(look: Look) -> None:
    with sdpa_kernel([SDPBackend.MATH]):
        assert reason(look(nn.Sequential(nn.Linear(32, 32)))).startswith(
            "neither a configuration nor a profiled GPU step"
        )


def profiled(
    *groups: tuple[str, str | None, float] | tuple[str, str | None, float, Family | None],
    busy_ms: float = 100.0,
    reliable: bool = True,
) -> Arm:
    """The step as it is with a breakdown as a trial on a GPU would have made it: 100 ms, 10 ms at the deepest
    cut."""
    breakdown = Breakdown(
        families_ms={"gemm_16bit": 5.0},
        reliable=reliable,
        busy_ms=busy_ms,
        groups=tuple(
            KernelGroup(
                name=name,
                family=classify(name, operator, inside=inside),
                operator=operator,
                count=12,
                time_ms=ms,
            )
            for name, operator, ms, inside in ((*group, None)[:4] for group in groups)
        ),
    )
    return ran("as_is", cuts=(ArmCut(step_ms=4.0), ArmCut(step_ms=10.0)), breakdown=breakdown)


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
def test_kernels_of_a_step_show_what_no_configuration_tells(
    look: Look, softmax: tuple[str, str | None, float]
) -> None:
    finding = found(timed(look(ByHand()), profiled(BMM, softmax, LOSS)))
    assert finding.title == "Attention without a fused kernel takes 16% of the GPU's time"
    assert (finding.evidence["softmax_ms"], finding.evidence["batched_gemm_ms"]) == (0.6, 1.0)
    assert finding.treatment is not None
    x = torch.ones(1, 8, 64)
    names = dict(zip(("query", "key", "value"), Own().proj(x).chunk(3, dim=-1), strict=True)) | {
        "torch": torch
    }
    exec(finding.treatment.code, names)
    assert "output" in names


@pytest.mark.parametrize(
    "arm",
    [
        profiled(BMM, LOSS),
        profiled(EAGER),
        profiled(
            ("nvjet_sm90_tst_experts_TNN", "aten::bmm", 5.0),
            ("cunn_SoftMaxForward<float, 4>", "aten::_softmax", 0.04),
            FUSED,
        ),
        profiled(BMM, EAGER, reliable=False),
        profiled(("gemm", "aten::bmm", 0.5), ("softmax", "aten::_softmax", 0.1)),
        ran("as_is", breakdown=None, cuts=(ArmCut(step_ms=10.0),)),
        ran("as_is", cuts=(ArmCut(step_ms=10.0),)),
    ],
    ids=[
        "a loss",
        "a router",
        "experts and their router beside fused attention",
        "unreliable",
        "a tenth is not reached",
        "not profiled",
        "not recorded",
    ],
)
def test_kernels_that_prove_nothing(look: Look, arm: Arm) -> None:
    assert slow_attention_backend(timed(look(llama()), arm)) is None


def test_profiled_kernels_are_evidence_for_the_configuration_too(look: Look) -> None:
    finding = found(timed(look(llama(attn_implementation="eager")), profiled(BMM, EAGER)))
    assert finding.explanation.endswith(
        "In the profiled step, its softmax, batched matmuls and the kernels between them take at least "
        "1.6 ms, 16% of the GPU's time."
    )
    assert finding.evidence["share_pct"] == pytest.approx(16.0)
    assert "must be eager" in reason(timed(look(gemma2()), profiled(BMM, EAGER)))


def test_kernels_of_a_cpu_tell_nothing_of_a_gpu(look: Look) -> None:
    """There torch's attention takes its math backend for every dropout, as BERT's, and no GPU does."""
    facts = timed(look(llama()), profiled(BMM, EAGER), device="cpu")
    assert slow_attention_backend(facts) is None
    eager = timed(look(llama(attn_implementation="eager")), profiled(BMM, EAGER), device="cpu")
    assert "profiled step" not in found(eager).explanation


def test_a_step_that_waits_for_its_host_does_not_hide_it(look: Look) -> None:
    assert found(timed(look(ByHand()), profiled(BMM, EAGER, busy_ms=20.0))).evidence[
        "share_pct"
    ] == pytest.approx(80.0)


MATH = (
    ("sm80_xmma_gemm_f32f32_f32f32_f32_nn_n_tilesize64x64x8", "aten::bmm", 1.36, "attention"),
    (
        "void (anonymous namespace)::softmax_warp_backward<float, float, float, 9, false, false>",
        "aten::_softmax_backward_data",
        0.17,
    ),
    (
        "void at::native::elementwise_kernel<128, 4, at::native::CUDAFunctor_add<float>>",
        "aten::add_",
        0.3,
        "attention",
    ),
    FUSED,
)
"""T5's attention on an H200, eager, a tenth of its ms: self-attention takes torch's math backend,
cross-attention cuDNN."""


def t5(look: Look, version: str) -> Facts:
    with torch.device("meta"):
        facts = look(T5ForConditionalGeneration(T5Config(num_layers=1, use_cache=False)))
    return msgspec.structs.replace(
        facts, software=Software(packages={"transformers": Package(version=version, imported=True)})
    )


@pytest.mark.parametrize(
    ("version", "name"), [("5.17.0", "contiguous-position-bias"), ("5.20.0", "say-why-not-fused")]
)
def test_torchs_attention_that_falls_back_beside_one_that_is_fused(
    look: Look, version: str, name: str
) -> None:
    finding = found(timed(t5(look, version), profiled(*MATH)))
    assert finding.title == "Attention without a fused kernel takes 18% of the GPU's time"
    assert (
        "take at least 1.8 ms, 18% of the GPU's time. Other calls use a fused kernel." in finding.explanation
    )
    assert finding.evidence["between_ms"] == pytest.approx(0.3)
    assert finding.treatment is not None
    assert finding.treatment.name == name
    assert slow_attention_backend(timed(t5(look, version), profiled(FUSED))) is None, "treated"


def test_transformers_hands_a_position_bias_over_contiguous(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the treatment promises, on the transformers that is installed."""
    masks: list[torch.Tensor] = []
    inner = functional.scaled_dot_product_attention

    def watched(*arguments: Any, attn_mask: torch.Tensor, **settings: Any) -> torch.Tensor:
        masks.append(attn_mask)
        return inner(*arguments, attn_mask=attn_mask, **settings)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", watched)
    model = T5ForConditionalGeneration(
        T5Config(
            d_model=16,
            d_ff=16,
            d_kv=8,
            num_heads=2,
            num_layers=1,
            decoder_start_token_id=0,
            vocab_size=64,
            use_cache=False,
        )
    )
    model(input_ids=TOKENS, labels=TOKENS)
    assert len(masks) == 3
    if Version(transformers.__version__) >= Version(CONTIGUOUS_BIAS):
        assert {mask.stride(-1) for mask in masks} == {1}
    else:
        assert {mask.stride(-1) for mask in masks} == {1, 2}


def test_asking_torch_raises_where_it_would_fall_back() -> None:
    """A mask that no fused backend of a CPU takes: one that needs a gradient."""
    x = torch.ones(1, 2, 4, 8)
    mask = torch.zeros(4, 4, requires_grad=True)
    names = {
        "compute_loss": lambda mask, x: functional.scaled_dot_product_attention(
            x, x, x, attn_mask=mask
        ).sum(),
        "model": mask,
        "batch": x,
    }
    with pytest.raises(RuntimeError, match=r"No available kernel|No viable backend"):
        exec(ASK_TORCH.code, names)


def alone(name: str) -> Callable[[VariantPlanner, VariantPlan], list[VariantPlan]]:
    """The arm of the treatment that the finding names."""

    def plans(of: VariantPlanner, as_is: VariantPlan) -> list[VariantPlan]:
        (finding,) = run(select(discover(), ["MEM004"]), of.facts)[0]
        assert finding.treatment is not None
        assert finding.treatment.name == name
        return [of.on(as_is, [finding.treatment], name)]

    return plans


TOKENS = torch.arange(64).reshape(1, 64)


@pytest.mark.slow
def test_the_trial_times_fused_attention_and_measures_the_finding() -> None:
    model = llama(attn_implementation="eager").bfloat16()
    facts = tried(model, {"input_ids": TOKENS, "labels": TOKENS}, "as_is", more=alone("attention-sdpa"))
    arms = {arm.name: arm.reason for arm in facts.trial.arms}
    assert arms["attention-sdpa"] is None
    saved = {}
    for device in ("cuda", "cpu"):
        timed = msgspec.structs.replace(facts, trial=msgspec.structs.replace(facts.trial, device=device))
        (finding,), _ = with_measured_savings(TrialView(timed), *run(select(discover(), ["MEM004"]), timed))
        saved[device] = finding.saving_ms and finding.saving_ms.basis
    assert saved == {"cuda": "measured", "cpu": None}, "what a CPU saves says nothing about a GPU"
    assert model.config._attn_implementation == "eager"


@pytest.mark.slow
def test_the_trial_switches_the_backends_on_for_its_arm_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[tuple[str, ...]] = set()
    inner = functional.scaled_dot_product_attention

    def watched(*arguments: Any, **settings: Any) -> torch.Tensor:
        seen.add(sdp_backends())
        return inner(*arguments, **settings)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", watched)
    with sdpa_kernel([SDPBackend.MATH]):
        facts = tried(
            Own().bfloat16(), torch.ones(2, 16, 64).bfloat16(), "as_is", more=alone("fused-attention-on")
        )
        assert sdp_backends() == ("math",)
    assert {arm.name: arm.reason for arm in facts.trial.arms}["fused-attention-on"] is None
    assert seen == {("math",), BACKENDS}
    assert facts.trial.harm == ()


def test_treatments_that_do_not_apply(look: Look) -> None:
    with pytest.raises(NotTried, match="no fused backend is switched off"):
        function_of("fused-attention-on")(
            Variant(Own(), None), TreatmentContext(look(Own()), "fused-attention-on")
        )


def test_attention_that_is_taken_when_the_model_is_built(look: Look) -> None:
    """Falcon asks once, in its constructor, and transformers' switch only warns."""
    from transformers import FalconConfig, FalconForCausalLM

    model = FalconForCausalLM(
        FalconConfig(
            hidden_size=64,
            num_hidden_layers=1,
            num_attention_heads=4,
            vocab_size=96,
            attn_implementation="eager",
        )
    )
    assert (
        found(look(model)).title
        == "Eager attention runs in FalconForCausalLM instead of torch's fused kernels"
    )
    with pytest.raises(NotTried, match="FalconForCausalLM takes its attention when it is built"):
        function_of("attention-sdpa")(Variant(model, None), TreatmentContext(look(model), "attention-sdpa"))
