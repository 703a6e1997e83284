"""Treatments of adapters, precision, attention, cache, optimizer and batch do to a replica what they say,
leave the model that it was copied from as it was, and have a name and traits."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from fp8doctor.analysis.treatment_table import TREATMENTS
from fp8doctor.diagnosis.treatments import WRITTEN
from fp8doctor.facts import Target, Workload
from fp8doctor.loading.job import Job
from fp8doctor.recipes import BY_TREATMENT
from fp8doctor.trial.copies.step import Variant
from fp8doctor.trial.planning import WORTH_A_TRY
from fp8doctor.trial.treatments.apply import NotTried, TreatmentContext, function_of
from tests.examine.models import Stacked, llama, lora
from tests.trial.treated import TOKENS, applied, facts

pytestmark = pytest.mark.slow


def test_adapters_are_replaced_and_the_shared_parameters_stay() -> None:
    model = lora(llama().bfloat16())
    changed = applied("adapters-to-bf16", model).model
    pairs = list(zip(model.named_parameters(), changed.named_parameters(), strict=True))
    assert all((one is other) is ("lora_" not in name) for (name, one), (_, other) in pairs)
    assert all(one.requires_grad == other.requires_grad for (_, one), (_, other) in pairs)
    with pytest.raises(NotTried, match="no adapter in fp32"):
        applied("adapters-to-bf16", changed)


def test_fp32_runs_under_autocast() -> None:
    model = llama()
    assert applied("autocast-bf16", model).autocast is torch.bfloat16
    with pytest.raises(NotTried, match=r"under autocast already \(float16\)"):
        function_of("autocast-bf16")(
            Variant(model, None, torch.float16), TreatmentContext(facts(model), "autocast-bf16")
        )


def test_eager_attention_runs_torchs_own_kernel_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = llama(attn_implementation="eager"), []
    changed = applied("attention-sdpa", model).model
    own = functional.scaled_dot_product_attention

    def counted(*given: Any, **more: Any) -> torch.Tensor:
        calls.append(1)
        return own(*given, **more)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", counted)
    model(**TOKENS)
    assert calls == []
    changed(**TOKENS)
    assert len(calls) == 2
    with pytest.raises(NotTried, match="no configuration in it asks for eager"):
        applied("attention-sdpa", changed)


def job(model: nn.Module, optimizer: Any = None) -> Job:
    return Job(model=model, target=Target(), workload=Workload(accumulate=1), optimizer=optimizer)


def test_an_optimizer_is_fused_once() -> None:
    model = Stacked()
    assert applied("fused-optimizer", model, job=job(model, torch.optim.AdamW(model.parameters()))).fused
    for optimizer in (
        torch.optim.AdamW(model.parameters(), fused=True),
        torch.optim.Adadelta(model.parameters()),
        None,
    ):
        with pytest.raises(NotTried, match="fused already, or has no fused form"):
            applied("fused-optimizer", model, job=job(model, optimizer))


def test_every_treatment_names_functions_that_exist() -> None:
    for name in TREATMENTS:
        assert callable(function_of(name))
    assert set(WORTH_A_TRY) <= set(TREATMENTS) & {*WRITTEN, *BY_TREATMENT}
