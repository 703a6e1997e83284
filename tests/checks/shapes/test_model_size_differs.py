"""SHP006 on real models: what their names say, what they hold, and names that must not be misread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from fp8doctor.checks.shapes.model_size_differs import claims_in
from fp8doctor.facts import Facts, Target
from tests.checks.environment.live import finding_of, outcome_of
from tests.configurations import LLAMA_8B

Look = Callable[..., Facts]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up, self.down = (
            nn.Linear(width, 4 * width, bias=False),
            nn.Linear(width, 4 * width, bias=False),
            nn.Linear(4 * width, width, bias=False),
        )


class Decoder(nn.Module):
    """The 454 M decoder of the founding documents."""

    def __init__(self, layers: int = 24) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50257, 1024)
        self.blocks = nn.ModuleList(Block(1024) for _ in range(layers))
        self.head = nn.Linear(1024, 50257, bias=False)
        self.head.weight = self.embedding.weight


class Decoder350M(Decoder):
    pass


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build()


def in_file(facts: Facts, file: str, attribute: str = "build_model") -> Facts:
    return msgspec.structs.replace(facts, target=Target(kind="file", name=file, attribute=attribute))


def test_454m_called_350m(look: Look) -> None:
    finding = finding_of("SHP006", look(on_meta(Decoder350M)))
    assert finding is not None
    assert finding.severity == "info"
    assert finding.title == "The model has 454M parameters, but its class (Decoder350M) says 350M"
    assert finding.treatment is not None
    assert finding.treatment.code == "layers = 18   # 353M parameters"


def test_the_treatment_makes_it_silent(look: Look) -> None:
    finding = finding_of("SHP006", look(on_meta(Decoder350M)))
    assert finding is not None
    assert finding.treatment is not None
    scope: dict[str, Any] = {}
    exec(finding.treatment.code, scope)
    facts = look(on_meta(lambda: Decoder350M(layers=scope["layers"])))
    assert facts.network.parameters == pytest.approx(350e6, rel=0.02)
    assert outcome_of("SHP006", facts).outcome == "healthy"


@pytest.mark.parametrize(
    ("file", "attribute", "outcome"),
    [
        ("train_350m.py", "build_model", "sick"),
        ("train_454M.py", "build_model", "healthy"),
        ("train.py", "model_350m", "sick"),
        ("train.py", "build_model", "not_applicable"),
        ("fineweb_10b.py", "build_model", "not_applicable"),
        ("decoder_0.45b.py", "build_model", "healthy"),
        ("decoder_0_45b.py", "build_model", "healthy"),
        ("decoder_350m_or_454m.py", "build_model", "healthy"),
    ],
)
def test_names_of_files_and_functions(file: str, attribute: str, outcome: str, look: Look) -> None:
    assert outcome_of("SHP006", in_file(look(on_meta(Decoder)), file, attribute)).outcome == outcome


def test_the_name_in_the_configuration(look: Look) -> None:
    config = LlamaConfig(hidden_size=1024, intermediate_size=4096, num_hidden_layers=24, vocab_size=32000)
    config._name_or_path = "/home/somebody/checkpoints/Llama-350M"
    facts = look(on_meta(lambda: LlamaForCausalLM(config)))
    assert facts.network.configured_name == "Llama-350M"
    finding = finding_of("SHP006", facts)
    assert finding is not None
    assert finding.evidence["claimed_by"] == "its configuration (Llama-350M)"
    assert finding.treatment is not None
    assert finding.treatment.code.startswith("config.num_hidden_layers = ")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("meta-llama/Llama-3.1-8B", LLAMA_8B),
        (
            "meta-llama/Llama-3.2-1B",
            {
                "model_type": "llama",
                "hidden_size": 2048,
                "intermediate_size": 8192,
                "num_hidden_layers": 16,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "vocab_size": 128256,
                "tie_word_embeddings": True,
            },
        ),
        (
            "huggyllama/llama-30b",
            {
                "model_type": "llama",
                "hidden_size": 6656,
                "intermediate_size": 17920,
                "num_hidden_layers": 60,
                "num_attention_heads": 52,
                "vocab_size": 32000,
            },
        ),
        (
            "google/gemma-2b",
            {
                "model_type": "gemma",
                "hidden_size": 2048,
                "intermediate_size": 16384,
                "num_hidden_layers": 18,
                "num_attention_heads": 8,
                "num_key_value_heads": 1,
                "head_dim": 256,
                "vocab_size": 256000,
            },
        ),
        (
            "google/gemma-7b",
            {
                "model_type": "gemma",
                "hidden_size": 3072,
                "intermediate_size": 24576,
                "num_hidden_layers": 28,
                "num_attention_heads": 16,
                "num_key_value_heads": 16,
                "head_dim": 256,
                "vocab_size": 256000,
            },
        ),
        (
            "Qwen/Qwen2.5-0.5B",
            {
                "model_type": "qwen2",
                "hidden_size": 896,
                "intermediate_size": 4864,
                "num_hidden_layers": 24,
                "num_attention_heads": 14,
                "num_key_value_heads": 2,
                "vocab_size": 151936,
                "tie_word_embeddings": True,
            },
        ),
        (
            "Qwen/Qwen1.5-0.5B",
            {
                "model_type": "qwen2",
                "hidden_size": 1024,
                "intermediate_size": 2816,
                "num_hidden_layers": 24,
                "num_attention_heads": 16,
                "num_key_value_heads": 16,
                "vocab_size": 151936,
                "tie_word_embeddings": True,
            },
        ),
        (
            "EleutherAI/pythia-160m",
            {
                "model_type": "gpt_neox",
                "hidden_size": 768,
                "intermediate_size": 3072,
                "num_hidden_layers": 12,
                "num_attention_heads": 12,
                "vocab_size": 50304,
            },
        ),
        (
            "facebook/opt-350m",
            {
                "model_type": "opt",
                "hidden_size": 1024,
                "ffn_dim": 4096,
                "num_hidden_layers": 24,
                "num_attention_heads": 16,
                "vocab_size": 50272,
                "word_embed_proj_dim": 512,
            },
        ),
        (
            "allenai/OLMo-1B-hf",
            {
                "model_type": "olmo",
                "hidden_size": 2048,
                "intermediate_size": 8192,
                "num_hidden_layers": 16,
                "num_attention_heads": 16,
                "vocab_size": 50304,
                "tie_word_embeddings": True,
            },
        ),
    ],
)
def test_released_models_have_the_size_of_their_names(
    name: str, settings: dict[str, Any], look: Look
) -> None:
    config = AutoConfig.for_model(**settings)
    config._name_or_path = name
    facts = look(on_meta(lambda: AutoModelForCausalLM.from_config(config)))
    assert outcome_of("SHP006", facts).outcome == "healthy", facts.network.parameters


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("Llama-3.1-8B", [8e9]),
        ("Qwen3-30B-A3B", [30e9]),
        ("Mixtral-8x7B", []),
        ("gemma-3n-E4B", []),
        ("bloom-7b1", []),
        ("internlm2-1_8b", [8e9, 1.8e9]),
        ("llama_3_8b", [8e9, 3.8e9]),
        ("Qwen1.5-0.5B", [0.5e9]),
        ("Decoder350M", [350e6]),
        ("opt-125m", [125e6]),
        ("model-8bit", []),
        ("w4a16", []),
        ("bf16", []),
    ],
)
def test_what_is_read_from_a_name(name: str, sizes: list[float]) -> None:
    assert [claim.parameters for claim in claims_in("", name)] == pytest.approx(sizes)


@pytest.mark.slow
def test_lora_is_not_counted(look: Look) -> None:
    from peft import LoraConfig, get_peft_model

    config = LlamaConfig(hidden_size=256, intermediate_size=1024, num_hidden_layers=8, vocab_size=1024)
    config._name_or_path = "llama-9M"
    facts = look(
        on_meta(
            lambda: get_peft_model(LlamaForCausalLM(config), LoraConfig(r=64, target_modules="all-linear"))
        )
    )
    assert facts.network.parameters > 1.2 * 9e6
    assert outcome_of("SHP006", facts).outcome == "healthy"


def test_a_cut_has_no_size_to_keep(look: Look) -> None:
    facts = in_file(look(on_meta(lambda: Decoder(16))), "decoder_454m.py")
    assert outcome_of("SHP006", facts).outcome == "sick"
    cut = msgspec.structs.replace(facts, target=msgspec.structs.replace(facts.target, layers=16))
    assert outcome_of("SHP006", cut).outcome == "not_applicable"


def test_experts_count_differently(look: Look) -> None:
    config = AutoConfig.for_model(
        "mixtral",
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        vocab_size=256,
        num_local_experts=4,
    )
    config._name_or_path = "mixtral-2M"
    facts = look(on_meta(lambda: AutoModelForCausalLM.from_config(config)))
    assert outcome_of("SHP006", facts).outcome == "not_applicable"
