"""The test of ``tests/test_untouched_models.py`` on 50 more models of transformers, and longer ones."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

from fp8doctor import inspect_model
from fp8doctor.cost.matmuls import rows_seen
from fp8doctor.facts import recorded
from tests import test_untouched_models as gate
from tests.looked import looked
from tests.test_untouched_models import BOTH, TOWERS, TWO, Untouched, each_of

DECODERS = (
    Untouched("MistralForCausalLM", "MistralConfig", TWO, (2,)),
    Untouched("Qwen2ForCausalLM", "Qwen2Config", TWO, (2,)),
    Untouched("Qwen3ForCausalLM", "Qwen3Config", TWO, (2,)),
    Untouched("Gemma2ForCausalLM", "Gemma2Config", TWO, (2,)),
    Untouched("Gemma3ForCausalLM", "Gemma3TextConfig", TWO, (2,)),
    Untouched("PhiForCausalLM", "PhiConfig", TWO, (2,)),
    Untouched("Phi3ForCausalLM", "Phi3Config", TWO, (2,)),
    Untouched("GPTNeoXForCausalLM", "GPTNeoXConfig", TWO, (2,)),
    Untouched("GPTJForCausalLM", "GPTJConfig", {"n_layer": 2}, (2,)),
    Untouched("OPTForCausalLM", "OPTConfig", TWO, (2,)),
    Untouched("BloomForCausalLM", "BloomConfig", {"n_layer": 2, "hidden_size": 1024, "n_head": 16}, (2,)),
    Untouched("FalconForCausalLM", "FalconConfig", TWO, (2,)),
    Untouched("MptForCausalLM", "MptConfig", {"n_layers": 2}, (2,)),
    Untouched("Olmo2ForCausalLM", "Olmo2Config", TWO, (2,)),
    Untouched("CohereForCausalLM", "CohereConfig", TWO, (2,)),
    Untouched("SmolLM3ForCausalLM", "SmolLM3Config", TWO, (2,)),
    Untouched("Starcoder2ForCausalLM", "Starcoder2Config", TWO, (2,)),
    Untouched("MambaForCausalLM", "MambaConfig", TWO, (2,)),
)
ENCODERS = (
    Untouched("RobertaForMaskedLM", "RobertaConfig", TWO, (2,)),
    Untouched("DistilBertForMaskedLM", "DistilBertConfig", {"n_layers": 2}, (2,)),
    Untouched("EsmForMaskedLM", "EsmConfig", {"vocab_size": 33, "pad_token_id": 1, **TWO}, (2,)),
    Untouched("ModernBertForMaskedLM", "ModernBertConfig", TWO, (2,)),
)
OTHER_ENCODERS = (
    Untouched("BertForSequenceClassification", "BertConfig", TWO, (2,)),
    Untouched("ElectraForPreTraining", "ElectraConfig", TWO, (2,), head=False),
    Untouched("DebertaV2ForMaskedLM", "DebertaV2Config", TWO, (2,)),
    Untouched("XLNetLMHeadModel", "XLNetConfig", {"n_layer": 2}, (2,)),
    Untouched("LongformerForMaskedLM", "LongformerConfig", {"attention_window": [512, 512], **TWO}, (2,)),
    Untouched("FNetForMaskedLM", "FNetConfig", TWO, (2,)),
    Untouched("BigBirdForMaskedLM", "BigBirdConfig", TWO, (2,)),
)
ENCODER_DECODERS = (
    Untouched("MT5ForConditionalGeneration", "MT5Config", {"num_layers": 2}, (2, 2)),
    Untouched("BartForConditionalGeneration", "BartConfig", BOTH, (2, 2)),
    Untouched("PegasusForConditionalGeneration", "PegasusConfig", BOTH, (2, 2)),
    Untouched("MarianMTModel", "MarianConfig", BOTH, (2, 2)),
    Untouched("M2M100ForConditionalGeneration", "M2M100Config", BOTH, (2, 2)),
)
EXPERTS = (
    Untouched("Qwen2MoeForCausalLM", "Qwen2MoeConfig", TWO, (2,)),
    Untouched("Qwen3MoeForCausalLM", "Qwen3MoeConfig", TWO, (2,)),
    Untouched("OlmoeForCausalLM", "OlmoeConfig", TWO, (2,)),
    Untouched("DeepseekV3ForCausalLM", "DeepseekV3Config", {"num_hidden_layers": 4}, (4,)),
    Untouched("GptOssForCausalLM", "GptOssConfig", TWO, (2,)),
    Untouched("GraniteMoeForCausalLM", "GraniteMoeConfig", TWO, (2,)),
)
VISION = (
    Untouched("ViTForImageClassification", "ViTConfig", TWO, (2,)),
    Untouched("DeiTForImageClassification", "DeiTConfig", TWO, (2,)),
    Untouched("BeitForImageClassification", "BeitConfig", TWO, (2,)),
    Untouched("Dinov2Model", "Dinov2Config", TWO, (2,), head=False),
    Untouched("ConvNextForImageClassification", "ConvNextConfig", {}, (3, 3, 9, 3)),
    Untouched("VideoMAEForVideoClassification", "VideoMAEConfig", TWO, (2,)),
)
AUDIO = (
    Untouched("Wav2Vec2ForCTC", "Wav2Vec2Config", TWO, (2,)),
    Untouched("HubertForCTC", "HubertConfig", TWO, (2,)),
    Untouched("ASTForAudioClassification", "ASTConfig", TWO, (2,)),
    Untouched("Speech2TextForConditionalGeneration", "Speech2TextConfig", BOTH, (2, 2)),
)
MULTIMODAL = (
    Untouched("CLIPModel", "CLIPConfig", TOWERS, (2, 2), head=False),
    Untouched("BlipForConditionalGeneration", "BlipConfig", TOWERS, (2, 2)),
    Untouched("LlavaForConditionalGeneration", "LlavaConfig", {}, (24, 32)),
    Untouched("Gemma3ForConditionalGeneration", "Gemma3Config", TOWERS, (2, 2)),
    Untouched("LayoutLMv3ForTokenClassification", "LayoutLMv3Config", TWO, (2,)),
)
MODELS = (*DECODERS, *ENCODERS, *OTHER_ENCODERS, *ENCODER_DECODERS, *EXPERTS, *VISION, *AUDIO, *MULTIMODAL)


@each_of(MODELS)
def test_an_untouched_model(untouched: Untouched) -> None:
    gate.test_an_untouched_model(untouched)


@each_of((*gate.DECODERS, *gate.ENCODERS, *DECODERS, *ENCODERS))
def test_flops_are_those_that_torch_counts(untouched: Untouched) -> None:
    """One forward and backward on the meta device; attention's own products are batched and counted apart."""
    model = untouched.build()
    ids = torch.empty((2, 16), dtype=torch.int64, device="meta")
    linears = inspect_model(model, {"input_ids": ids, "labels": ids}).facts.network.linears
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids).loss.backward()
    counted = {str(operator): flops for operator, flops in counter.get_flop_counts()["Global"].items()}
    of_linears = counted.get("aten.mm", 0) + counted.get("aten.addmm", 0)
    assert sum(each.flops_per_token for each in linears) * ids.numel() == pytest.approx(of_linears, rel=1e-3)


@each_of((gate.DECODERS[0], *gate.ENCODERS, *gate.ENCODER_DECODERS, *DECODERS, *ENCODERS, *ENCODER_DECODERS))
def test_a_converted_model_is_seen_as_converted(untouched: Untouched) -> None:
    """torchao's own classes are the truth; compiled block by block, nothing is left to find but the
    shapes."""
    float8 = pytest.importorskip("torchao.float8")
    model = untouched.build().bfloat16()
    heads = {id(model.get_output_embeddings())}  # type: ignore[operator]
    float8.convert_to_float8_training(
        model,
        module_filter_fn=lambda module, name: (
            id(module) not in heads and module.in_features % 16 == 0 and module.out_features % 16 == 0
        ),
    )
    before = inspect_model(model).facts.network
    converted = {
        name for name, each in model.named_modules() if isinstance(each, float8.float8_linear.Float8Linear)
    }
    assert converted
    assert {each.name for each in before.linears if each.use == "training"} == converted
    assert {each.recipe for each in before.linears if each.use == "training"} == {"tensorwise"}
    for blocks in before.blocks:
        for block in model.get_submodule(blocks.name).children():
            block.compile()
    after = inspect_model(model)
    assert [each.compiled for each in after.facts.network.blocks] == [each.count for each in before.blocks]
    inside = tuple(f"{blocks.name}." for blocks in before.blocks)
    assert all(
        (each.compiled is not None) == each.name.startswith(inside) for each in after.facts.network.linears
    )
    gives_up = [step.treatment.name for step in after.prescription] == ["stay-in-bf16"]
    assert after.verdict.status == "open" or (after.verdict.status == "fp8_slower" and gives_up)


WITH_ADAPTERS = (*gate.DECODERS[:2], *gate.EXPERTS, *DECODERS, *EXPERTS)


@each_of(tuple(each for each in WITH_ADAPTERS if each.model != "MambaForCausalLM"))
def test_adapters_are_those_of_peft(untouched: Untouched) -> None:
    peft = pytest.importorskip("peft")
    model = untouched.build().bfloat16()
    plain = inspect_model(model).facts.network
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules="all-linear"))
    report = inspect_model(wrapped)
    network = report.facts.network
    trainable, total = wrapped.get_nb_trainable_parameters()
    assert (network.trainable_parameters, network.adapter_parameters, network.parameters) == (
        trainable,
        trainable,
        total,
    )
    wrapped_layers = [each for each in wrapped.modules() if isinstance(each, peft.tuners.lora.LoraLayer)]
    assert sum(each.adapter == "base" for each in network.linears) == len(wrapped_layers)
    assert sum(each.adapter == "adapter" for each in network.linears) == 2 * len(wrapped_layers)
    assert [each.count for each in network.blocks] == [each.count for each in plain.blocks]
    assert [each.role for each in network.linears if each.adapter != "adapter"] == [
        each.role for each in plain.linears
    ]
    assert sum(each.flops_share_pct or 0.0 for each in network.linears) == pytest.approx(100.0)
    assert [(each.code, each.title) for each in report.findings if each.severity != "info"] == []


@pytest.mark.parametrize(
    "untouched",
    [
        Untouched(
            "SwitchTransformersForConditionalGeneration",
            "SwitchTransformersConfig",
            {
                "num_layers": 2,
                "num_decoder_layers": 2,
                "num_sparse_encoder_layers": 1,
                "num_sparse_decoder_layers": 1,
            },
            (2, 2),
        ),
        Untouched(
            "NllbMoeForConditionalGeneration",
            "NllbMoeConfig",
            {"num_experts": 8, **BOTH, "encoder_sparse_step": 2, "decoder_sparse_step": 2},
            (2, 2),
        ),
    ],
    ids=["Switch", "NllbMoe"],
)
def test_experts_in_a_dictionary(untouched: Untouched) -> None:
    """Only their routers' code says how many experts see a token, so their work is not recorded."""
    linears = inspect_model(untouched.build()).facts.network.linears
    experts = [each for each in linears if ".experts." in each.name]
    assert {each.role for each in experts} == {"experts"}
    assert not any(recorded(each, "flops_per_token") for each in experts)


@pytest.mark.slow
def test_layers_that_are_shared_by_repetition() -> None:
    """ALBERT runs one block twelve times: in FP8, of which the rows are counted, it is all these calls."""
    model = gate.ALBERT.build()
    ids = torch.empty((2, 64), dtype=torch.int64, device="meta")
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids).loss.backward()
    counted = {str(operator): flops for operator, flops in counter.get_flop_counts()["Global"].items()}
    in_fp8 = convert_to_float8_training(model, config=Float8LinearConfig(emulate=True))
    facts = looked(in_fp8, {"input_ids": ids}).facts
    assert sum(
        each.flops_per_token * sum(rows_seen(each, facts)) for each in facts.network.linears
    ) == pytest.approx(counted["aten.mm"] + counted["aten.addmm"], rel=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("untouched", "blocks"),
    [
        (Untouched("JambaForCausalLM", "JambaConfig", {"num_hidden_layers": 8}, (8,)), "model.layers"),
        (
            Untouched("MllamaForConditionalGeneration", "MllamaConfig", {}, (32, 8, 40)),
            "model.language_model.layers",
        ),
    ],
    ids=["Jamba", "Mllama"],
)
def test_blocks_of_two_classes(untouched: Untouched, blocks: str) -> None:
    assert blocks in {each.name for each in inspect_model(untouched.build()).facts.network.blocks}
