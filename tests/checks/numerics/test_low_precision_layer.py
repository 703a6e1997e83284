"""NUM002 on real Float8Linears, measured by a real trial on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from fp8doctor import registry
from fp8doctor.checks.numerics.low_precision_layer import FIRES, SILENT, low_precision_layer
from fp8doctor.facts import Facts, LayerNumerics, Target, Trial, Workload
from fp8doctor.finding import Finding, NotApplicable
from fp8doctor.loading.job import Job
from fp8doctor.trial.treatments.apply import carry_out
from tests.checks.numerics.outliers import (
    batch,
    decoder,
    in_fp8,
    massive_token,
    one_outlier,
    outlier_channels,
)
from tests.checks.trials import tried

pytestmark = pytest.mark.slow


def test_the_layer_with_the_outlier_is_named_and_bf16_mends_it() -> None:
    model = in_fp8(decoder(None, one_outlier, None))
    facts = tried(model, batch(), "as_is", "bf16")
    finding = low_precision_layer(facts)
    assert isinstance(finding, Finding)
    assert finding.evidence["layers"] == ("1.down",)
    assert finding.evidence["of"] == ("output",)
    assert finding.evidence["sqnr_db"][0] < 5  # type: ignore[index, operator]
    assert "1 of 6 FP8 layers" in finding.title
    assert "% of its elements became zero" in finding.explanation
    assert finding.treatment is not None
    assert "1.down" in finding.treatment.code or "model[1].down" in finding.treatment.code
    assert "rowwise" in finding.treatment.code
    treated = carry_out([finding.treatment], model, facts)
    again = tried(treated, batch(), "as_is", "bf16")
    assert len(again.trial.numerics) == 5
    assert low_precision_layer(again) is None


@pytest.mark.gate("None")
@pytest.mark.parametrize("between", [None, outlier_channels, massive_token])
def test_outliers_that_fp8_can_hold(between: Any) -> None:
    assert low_precision_layer(tried(in_fp8(decoder(None, between)), batch(), "as_is", "bf16")) is None


def llama() -> tuple[nn.Module, Any]:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 128,
    }
    tokens = torch.randint(0, 128, (2, 32))
    return LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, use_cache=False)), {
        "input_ids": tokens,
        "labels": tokens,
    }


def opt() -> tuple[nn.Module, Any]:
    """Biases, LayerNorm and learned positions, as in GPT-2, whose own projections are no Linears."""
    from transformers import OPTConfig, OPTForCausalLM

    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "ffn_dim": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 128,
        "word_embed_proj_dim": 64,
    }
    tokens = torch.randint(0, 128, (2, 32))
    return OPTForCausalLM(OPTConfig(**sizes, max_position_embeddings=64, use_cache=False)), {
        "input_ids": tokens,
        "labels": tokens,
    }


def vit() -> tuple[nn.Module, Any]:
    from transformers import ViTConfig, ViTForImageClassification

    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 32,
        "patch_size": 8,
        "num_labels": 16,
    }
    images = {"pixel_values": torch.randn(4, 3, 32, 32).bfloat16(), "labels": torch.randint(0, 16, (4,))}
    return ViTForImageClassification(ViTConfig(**sizes)), images


@pytest.mark.gate("llama")
@pytest.mark.parametrize("make", [llama, opt, vit])
def test_transformers(
    make: Callable[[], tuple[nn.Module, Any]], monkeypatch: pytest.MonkeyPatch, look: Callable[..., Facts]
) -> None:
    """Untrained, and measured all the same: no layer of them is odd."""
    from fp8doctor.trial.layers import numerics
    from fp8doctor.trial.measure.bench import Bench

    monkeypatch.setattr(numerics, "synthetic", lambda *_: None)
    torch.manual_seed(0)
    model, data = make()
    job = Job(
        model=in_fp8(model.bfloat16()),
        target=Target(),
        workload=Workload(accumulate=1, batch_source="given"),
        batch=data,
    )
    found = numerics.layer_numerics(Bench(job, [], torch.device("cpu")), float("inf"))
    assert len(found) == sum(isinstance(module, nn.Linear) for module in job.model.modules())
    facts = msgspec.structs.replace(
        look(job.model, tokens=64), trial=Trial(device="cpu", arms=(), numerics=found)
    )
    assert low_precision_layer(facts) is None


def with_layers(*layers: LayerNumerics) -> Facts:
    return msgspec.structs.replace(FIRES, trial=msgspec.structs.replace(FIRES.trial, numerics=layers))


def layer(
    name: str,
    output: float | None = 28.5,
    typical: float | None = 28.5,
    of_input: float | None = 24.6,
    weight: float | None = 24.6,
) -> LayerNumerics:
    return LayerNumerics(
        name=name,
        output_sqnr_db=output,
        typical_output_sqnr_db=typical,
        input_gradient_sqnr_db=of_input,
        weight_gradient_sqnr_db=weight,
        saturated_pct=None,
        flushed_pct=None,
        non_finite=0,
    )


@pytest.mark.parametrize(
    ("layers", "named"),
    [
        ((layer("a"), layer("b"), layer("c", weight=12.0)), {"c": "weight gradient"}),
        ((layer("a"), layer("b"), layer("c", of_input=12.0)), {"c": "input gradient"}),
        ((layer("a"), layer("b"), layer("c", of_input=None, weight=None)), {}),
        ((layer("a", None, None, None, None),), {}),
        ((layer("a"), layer("b"), layer("c", 19.0, 19.0)), {}),
        (tuple(layer(name, 16.0, 16.0, 16.0, 16.0) for name in "abc"), {}),
        (tuple(layer(name, 4.0, 4.0) for name in "abc"), dict.fromkeys("abc", "output")),
        ((layer("a"), layer("b"), layer("c", 9.0, 2.0, 1.0, 14.0)), {"c": "input gradient"}),
    ],
    ids=[
        "weight gradient",
        "input gradient",
        "frozen",
        "zero",
        "below but good",
        "a coarse recipe",
        "all worthless",
        "the worst is told",
    ],
)
def test_what_is_low(layers: tuple[LayerNumerics, ...], named: dict[str, str]) -> None:
    finding = low_precision_layer(with_layers(*layers))
    found = (
        dict(zip(finding.evidence["layers"], finding.evidence["of"], strict=True))
        if isinstance(finding, Finding)
        else {}
    )  # type: ignore[arg-type]
    assert found == named


@pytest.mark.parametrize(
    ("layers", "title"),
    [
        (
            (layer("a"), layer("b"), layer("c", 4.0)),
            "1 of 3 FP8 layers loses far more precision than the others: c",
        ),
        (
            (layer("a"), layer("b"), layer("c"), layer("d", 4.0), layer("e", 5.0)),
            "2 of 5 FP8 layers lose far more precision than the others: d, e",
        ),
        (
            tuple(layer(name, 4.0, 4.0) for name in "abcd"),
            "4 of 4 FP8 layers lose too much precision: a, b, c and 1 more",
        ),
        ((layer("a", 4.0, 4.0),), "1 of 1 FP8 layer loses too much precision: a"),
        (
            (layer("a", 9.0, 9.0), layer("b", 9.0, 9.0), layer("c", 9.0, 1.0)),
            "3 of 3 FP8 layers lose too much precision: c, a, b",
        ),
    ],
    ids=["one", "two", "all alike", "the only one", "all, one more so"],
)
def test_the_title_compares_only_what_differs(layers: tuple[LayerNumerics, ...], title: str) -> None:
    finding = low_precision_layer(with_layers(*layers))
    assert isinstance(finding, Finding)
    assert finding.title == title


def test_what_the_casts_clipped_is_said() -> None:
    odd = msgspec.structs.replace(layer("c", 3.0), saturated_pct=22.0)
    finding = low_precision_layer(with_layers(layer("a"), layer("b"), odd))
    assert isinstance(finding, Finding)
    assert "22% of its elements were clipped" in finding.explanation


def test_without_a_measured_layer_there_is_no_answer() -> None:
    assert isinstance(low_precision_layer(with_layers()), NotApplicable)
    gap = msgspec.structs.replace(
        SILENT.trial, numerics=msgspec.UNSET, gaps={"trial.numerics": "the batch is synthetic"}
    )
    checks = [each for each in registry.discover() if each.code == "NUM002"]
    (outcome,) = registry.run(checks, msgspec.structs.replace(SILENT, trial=gap))[1]
    assert outcome.outcome == "unknown"
    assert outcome.reason == "trial.numerics: the batch is synthetic"
