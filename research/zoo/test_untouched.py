"""The tests of ``tests/test_untouched_models.py`` on 50 more models of transformers."""

from __future__ import annotations

import pytest

from fp8doctor import inspect_model
from tests import test_untouched_models as gate
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
    Untouched("ElectraForPreTraining", "ElectraConfig", TWO, (2,)),
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


@each_of((*DECODERS, *ENCODERS))
def test_flops_are_those_that_torch_counts(untouched: Untouched) -> None:
    gate.test_flops_are_those_that_torch_counts(untouched)


@each_of((*DECODERS, *ENCODERS, *ENCODER_DECODERS))
def test_a_converted_model_is_seen_as_converted(untouched: Untouched) -> None:
    gate.test_a_converted_model_is_seen_as_converted(untouched)


@each_of(tuple(each for each in (*DECODERS, *EXPERTS) if each.model != "MambaForCausalLM"))
def test_adapters_are_those_of_peft(untouched: Untouched) -> None:
    gate.test_adapters_are_those_of_peft(untouched)


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
