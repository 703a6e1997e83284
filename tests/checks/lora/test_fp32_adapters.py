"""LORA002 on real PEFT models: what its defaults make of a BF16 base, and what is no disease."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from torchao.float8 import convert_to_float8_training
from transformers import LlamaConfig, LlamaForCausalLM

from fp8doctor.facts import Facts, Package
from tests.checks.environment.live import finding_of, outcome_of
from tests.stand_ins import transformer_engine as stand_in

Look = Callable[..., Facts]


def base(dtype: torch.dtype = torch.bfloat16) -> LlamaForCausalLM:
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=256
    )
    return LlamaForCausalLM(config).to(dtype)


def lora(model: Any, **settings: Any) -> PeftModel:
    return get_peft_model(
        model, LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"), **settings
    )


def float8_base() -> LlamaForCausalLM:
    return convert_to_float8_training(base(), module_filter_fn=lambda module, name: name != "lm_head")


def trained(model: Any) -> Any:
    ids = torch.zeros(1, 16, dtype=torch.int64)
    model(input_ids=ids, labels=ids).loss.backward()
    return model


@pytest.mark.parametrize(
    "build", [lambda: lora(float8_base()), lambda: trained(lora(base()))], ids=["FP8 base", "a step was seen"]
)
def test_the_default_of_peft(build: Callable[[], PeftModel], look: Look) -> None:
    finding = finding_of("LORA002", look(build()))
    assert finding is not None
    assert finding.severity == "warning"
    assert finding.title == "28 of 28 LoRA matrices are fp32 on a BF16 base"
    assert finding.evidence["autocast"] is None
    assert finding.evidence["first"] == "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default"


def test_the_treatment_makes_it_silent(look: Look) -> None:
    model = lora(base())
    finding = finding_of("LORA002", look(model))
    assert finding is not None
    assert finding.treatment is not None
    exec(finding.treatment.code, {"model": model, "torch": torch})
    assert outcome_of("LORA002", look(model)).outcome == "healthy"
    trained(model)
    assert all(each.grad is not None for each in model.parameters() if each.requires_grad)


def test_the_other_way_to_treat_it(look: Look) -> None:
    assert outcome_of("LORA002", look(lora(float8_base(), autocast_adapter_dtype=False))).outcome == "healthy"


def test_under_autocast_only_copies_remain(look: Look) -> None:
    finding = finding_of("LORA002", look(lora(float8_base()), autocast=torch.bfloat16))
    assert finding is not None
    assert finding.severity == "info"
    assert "bfloat16 autocast" in finding.explanation


def test_an_untouched_model_may_still_come_under_autocast(look: Look) -> None:
    finding = finding_of("LORA002", look(lora(base())))
    assert finding is not None
    assert finding.severity == "info"


@pytest.mark.slow
def test_a_model_that_accelerate_has_yet_to_prepare(forget_accelerate: None, look: Look) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(mixed_precision="bf16", cpu=True)
    finding = finding_of("LORA002", look(lora(float8_base())))
    assert finding is not None
    assert finding.severity == "info"
    accelerator.prepare(lora(float8_base()))
    finding = finding_of("LORA002", look(lora(float8_base())))
    assert finding is not None
    assert finding.severity == "warning", "that other model is the one it was made for"


def test_unsloth_multiplies_them_in_16_bits(look: Look) -> None:
    """As h200-unsloth_lora shows, whose profile has no matmul in fp32."""
    facts = look(lora(float8_base()))
    packages = {**facts.packages(), "unsloth": Package(version="2026.10.9", imported=True)}
    loaded = msgspec.structs.replace(
        facts, software=msgspec.structs.replace(facts.software, packages=packages)
    )
    assert outcome_of("LORA002", facts).outcome == "sick"
    assert outcome_of("LORA002", loaded).outcome == "not_applicable"


def test_on_the_meta_device_the_dtype_is_not_decided(look: Look) -> None:
    """It is told, as the default makes it so everywhere, and it is no warning."""
    with torch.device("meta"):
        model = lora(float8_base(), autocast_adapter_dtype=False)
    assert {each.dtype for name, each in model.named_parameters() if "lora_" in name} == {torch.float32}
    finding = finding_of("LORA002", look(model))
    assert finding is not None
    assert finding.severity == "info"
    assert "even if you pass `autocast_adapter_dtype=False`" in finding.explanation


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_base_that_is_not_bf16(dtype: torch.dtype, look: Look) -> None:
    assert outcome_of("LORA002", look(lora(base(dtype)))).outcome == "not_applicable"


def test_adapters_that_were_converted_are_no_fp32_matmuls(look: Look) -> None:
    """A Float8Linear casts whatever it is given; the copies of its input stay (LORA003 tells the rest)."""
    finding = finding_of("LORA002", look(convert_to_float8_training(lora(base()))))
    assert finding is not None
    assert finding.severity == "info"
    assert "fp32 matmul" not in finding.explanation
    assert "copy" in finding.explanation


class TeBlock(nn.Module):
    def __init__(self, te: Any) -> None:
        super().__init__()
        self.up, self.down = te.Linear(64, 128, bias=False), te.Linear(128, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x))


def test_adapters_over_transformer_engine(monkeypatch: pytest.MonkeyPatch, look: Look) -> None:
    """PEFT's own class for Transformer Engine's layers (0.21), over the stand-in of them."""
    from peft.tuners.lora import te as of_peft

    te: Any = stand_in.install(monkeypatch, "quantization")
    sys.modules["transformer_engine"].pytorch = te  # type: ignore[attr-defined]
    monkeypatch.setattr(of_peft, "te", sys.modules["transformer_engine"], raising=False)
    monkeypatch.setattr(of_peft, "is_te_pytorch_available", lambda: True)
    model = get_peft_model(TeBlock(te).bfloat16(), LoraConfig(r=16, target_modules=["up", "down"]))
    assert isinstance(model.base_model.model.up, of_peft.TeLinear)
    with te.autocast(enabled=True):
        model(torch.zeros(8, 64, dtype=torch.bfloat16)).sum().backward()
    facts = look(model)
    assert [(each.adapter, each.stack, each.dtype) for each in facts.network.linears[:2]] == [
        ("base", "transformer_engine", "bfloat16"),
        ("adapter", "torch", "float32"),
    ]
    finding = finding_of("LORA002", facts)
    assert finding is not None
    assert finding.title == "4 of 4 LoRA matrices are fp32 on a BF16 base"
    assert finding.severity == "warning"
    assert facts.network.adapter_parameters == 2 * 16 * (64 + 128)
    assert outcome_of("LORA003", facts).outcome == "healthy"


def test_without_lora(look: Look) -> None:
    assert outcome_of("LORA002", look(base())).outcome == "not_applicable"


def test_fp32_matmuls_are_what_it_costs() -> None:
    """What the page says: without autocast the adapters are multiplied in fp32, with it they are not."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Matmuls(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.fp32 = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.__name__ in ("mm.default", "addmm.default"):
                self.fp32 += args[-1].dtype is torch.float32
            return func(*args, **(kwargs or {}))

    ids, counted = torch.zeros(1, 16, dtype=torch.int64), []
    for autocast in (False, True):
        model = lora(base())
        with Matmuls() as matmuls, torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            model(input_ids=ids)
        counted.append(matmuls.fp32)
    assert counted == [28, 0]
