"""Untouched transformers models on the meta device: nothing is found on them, and what examine counts is what
is there."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from fp8doctor import inspect_model
from fp8doctor.report import Report

transformers = pytest.importorskip("transformers")

TWO = {"num_hidden_layers": 2}
TOWERS = {"text_config": TWO, "vision_config": TWO}
QWEN_VL = {"text_config": TWO, "vision_config": {"depth": 2}}
BOTH = {"encoder_layers": 2, "decoder_layers": 2}
OF_TEXT = ("ForCausalLM", "MaskedLM", "LMHeadModel")
"""Ends of the names of models that take tokens alone."""


@dataclasses.dataclass(frozen=True)
class Untouched:
    """A class of transformers, its configuration, and what a reader of its source counts."""

    model: str
    config: str
    settings: dict[str, Any]
    blocks: tuple[int, ...]
    """Lengths of the lists of blocks, in the order of the tree."""
    head: bool = True
    """Whether one Linear makes the logits, or what stands for them."""

    def build(self) -> nn.Module:
        with torch.device("meta"):
            model: nn.Module = getattr(transformers, self.model)(
                getattr(transformers, self.config)(**self.settings)
            )
        return model


DECODERS = (
    Untouched("LlamaForCausalLM", "LlamaConfig", TWO, (2,)),
    Untouched("GPT2LMHeadModel", "GPT2Config", {"n_layer": 2}, (2,)),
    Untouched("RwkvForCausalLM", "RwkvConfig", TWO, (2,)),
)
ENCODERS = (Untouched("BertForMaskedLM", "BertConfig", TWO, (2,)),)
ENCODER_DECODERS = (Untouched("T5ForConditionalGeneration", "T5Config", {"num_layers": 2}, (2, 2)),)
EXPERTS = (
    Untouched("MixtralForCausalLM", "MixtralConfig", TWO, (2,)),
    Untouched("Llama4ForCausalLM", "Llama4TextConfig", TWO, (2,)),
)
ALBERT = Untouched("AlbertForMaskedLM", "AlbertConfig", {}, ())
DETR = {"use_timm_backbone": False, "backbone": None, "use_pretrained_backbone": False, **BOTH}
MODELS = (
    *(*DECODERS, *ENCODERS, *ENCODER_DECODERS, *EXPERTS, ALBERT),
    Untouched("SwinForImageClassification", "SwinConfig", {"depths": [2, 2], "num_heads": [3, 6]}, (2, 2)),
    Untouched("DetrForObjectDetection", "DetrConfig", DETR, (2, 2)),
    Untouched("WhisperForConditionalGeneration", "WhisperConfig", BOTH, (2, 2)),
    Untouched("Qwen2VLForConditionalGeneration", "Qwen2VLConfig", QWEN_VL, (2, 2)),
)
"""One model of each kind, and those whose blocks, ties, heads or experts are unlike the others'; the nightly
tests of ``research/zoo`` have 50 more."""


def each_of(models: tuple[Untouched, ...]) -> Any:
    """Run a test on each of these models."""
    return pytest.mark.parametrize("untouched", models, ids=[each.model for each in models])


@each_of(MODELS)
def test_an_untouched_model(untouched: Untouched) -> None:
    model = untouched.build()
    found = inspect_model(model, trial=False)
    nothing_is_found(untouched, model, found)
    every_fact_of_the_model_was_read(untouched, model, found)
    text_is_made_up_for_every_model_of_text(untouched, model, found)
    linears_are_those_of_the_module_tree(untouched, model, found)
    shares_of_the_flops_add_up(untouched, model, found)
    blocks_are_those_of_the_architecture(untouched, model, found)
    the_head_is_what_transformers_calls_it(untouched, model, found)
    parameters_are_counted(untouched, model, found)


def nothing_is_found(untouched: Untouched, model: nn.Module, found: Report) -> None:
    assert [(each.code, each.title) for each in found.findings if each.severity != "info"] == []
    assert found.verdict.status == "no_fp8"
    assert found.worst() in (None, "info")
    assert [
        each
        for each in found.outcomes
        if each.outcome == "crashed" or (each.outcome == "unknown" and not each.reason)
    ] == []


def every_fact_of_the_model_was_read(untouched: Untouched, model: nn.Module, found: Report) -> None:
    assert {
        path: reason for path, reason in found.facts.gaps.items() if path.startswith(("network", "training"))
    } == {}
    assert [
        each
        for each in found.outcomes
        if each.outcome == "unknown" and not (each.reason or "").startswith(("trial", "observed"))
    ] == []


def text_is_made_up_for_every_model_of_text(untouched: Untouched, model: nn.Module, found: Report) -> None:
    """Whether the model runs on it is for the tests of the workload."""
    note = found.facts.workload.note or ""
    kinds = ("synthetic: 8 x ", "no synthetic batch could be built: ")
    assert note.startswith(kinds[:1] if untouched.model.endswith(OF_TEXT) else kinds), note


def linears_are_those_of_the_module_tree(untouched: Untouched, model: nn.Module, found: Report) -> None:
    linears = found.facts.network.linears
    expected = {
        name: (each.in_features, each.out_features, each.bias is not None)
        for name, each in model.named_modules()
        if isinstance(each, nn.Linear)
    }
    expected |= {
        name: (each.weight.shape[0], each.weight.shape[1], True)  # type: ignore[index, union-attr]
        for name, each in model.named_modules()
        if type(each).__name__ == "Conv1D"
    }
    plain = {
        each.name: (each.in_features, each.out_features, each.bias)
        for each in linears
        if each.role != "experts"
    }
    assert {name: plain.get(name) for name in expected} == expected
    for each in (each for each in linears if each.name not in expected):
        assert each.role in ("experts", "router") or "functional" in each.features, each.name
    assert len({each.name for each in linears}) == len(linears)


def shares_of_the_flops_add_up(untouched: Untouched, model: nn.Module, found: Report) -> None:
    shares = [each.flops_share_pct for each in found.facts.network.linears]
    assert all(share is not None and 0.0 < share <= 100.0 for share in shares)
    assert sum(share or 0.0 for share in shares) == pytest.approx(100.0)


def blocks_are_those_of_the_architecture(untouched: Untouched, model: nn.Module, found: Report) -> None:
    blocks = found.facts.network.blocks
    assert tuple(each.count for each in blocks) == untouched.blocks
    for each in blocks:
        held = model.get_submodule(each.name)
        assert isinstance(held, nn.ModuleList | nn.Sequential)
        assert len(held) == each.count
        assert each.compiled == 0
    assert not any(each.get("checkpointed") for each in found.facts.network.linears)


def the_head_is_what_transformers_calls_it(untouched: Untouched, model: nn.Module, found: Report) -> None:
    heads = [each.name for each in found.facts.network.linears if each.role == "head"]
    assert len(heads) == untouched.head
    output = model.get_output_embeddings()  # type: ignore[operator]
    if isinstance(output, nn.Linear):
        assert [model.get_submodule(name) for name in heads] == [output]


def parameters_are_counted(untouched: Untouched, model: nn.Module, found: Report) -> None:
    network = found.facts.network
    assert network.parameters == sum(each.numel() for each in model.parameters())
    assert network.trainable_parameters == sum(
        each.numel() for each in model.parameters() if each.requires_grad
    )
    assert network.dtypes.keys() == {str(each.dtype).removeprefix("torch.") for each in model.parameters()}
    assert set(network.devices) == {each.device.type for each in (*model.parameters(), *model.buffers())}
    assert (network.float8_parameters, network.adapter_parameters, network.wrappers) == (0, 0, ())
