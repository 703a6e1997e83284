"""A made-up batch runs on real models, is as long as it is said to be, and is described like one that was
given."""

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from fp8doctor.facts import Target
from fp8doctor.loading.job import Job
from fp8doctor.loading.synthetic_batch import job_of


def made(model: nn.Module, given: Any = None, **sizes: int | None) -> Job:
    return job_of(model, Target(), given, **sizes)


def outputs(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple) else model(batch)


def of_transformers(name: str, **settings: Any) -> nn.Module:
    """Build a model of transformers from the settings of its configuration."""
    transformers = pytest.importorskip("transformers")
    kind = getattr(transformers, name)
    return kind(kind.config_class(**settings))


SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
BERT = {**SMALL, "vocab_size": 64, "max_position_embeddings": 40}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 64}
T5["decoder_start_token_id"] = 0
VISION = {**SMALL, "image_size": 32, "patch_size": 8}

llama = partial(of_transformers, "LlamaForCausalLM", **SMALL, vocab_size=128, max_position_embeddings=64)
vit = partial(of_transformers, "ViTForImageClassification", **VISION)


def lora() -> nn.Module:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return peft.get_peft_model(llama(), config)


def llava() -> nn.Module:
    """The image is an argument with a default: text alone runs."""
    transformers = pytest.importorskip("transformers")
    text = transformers.LlamaConfig(**SMALL, vocab_size=128)
    return of_transformers(
        "LlavaForConditionalGeneration",
        text_config=text,
        vision_config=transformers.CLIPVisionConfig(**VISION),
    )


class Decoder(nn.Module):
    """Positions are defined before tokens, and the causal mask bounds the sequence."""

    def __init__(self, vocabulary: int = 100, width: int = 16, longest: int = 24) -> None:
        super().__init__()
        self.position = nn.Embedding(longest, width)
        self.embed = nn.Embedding(vocabulary, width)
        self.block = nn.TransformerEncoderLayer(width, 2, 32, batch_first=True)
        self.head = nn.Linear(width, vocabulary)
        self.register_buffer("mask", torch.triu(torch.full((longest, longest), float("-inf")), 1))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1]
        hidden = self.embed(tokens) + self.position.weight[:length]
        return self.head(self.block(hidden, src_mask=self.mask[:length, :length]))


@dataclass
class Shape:
    block_size: int = 20
    vocab_size: int = 50


class NanoGpt(nn.Module):
    """A dataclass for a configuration, and a loss only where targets are given."""

    def __init__(self) -> None:
        super().__init__()
        self.config = Shape()
        self.transformer = nn.ModuleDict({"wte": nn.Embedding(50, 16), "wpe": nn.Embedding(20, 16)})
        self.lm_head = nn.Linear(16, 50)

    def forward(
        self, idx: torch.Tensor, targets: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        hidden = self.transformer["wte"](idx) + self.transformer["wpe"].weight[: idx.shape[1]]
        logits = self.lm_head(hidden)
        return logits, None if targets is None else nn.functional.cross_entropy(
            logits.flatten(0, 1), targets.flatten()
        )


class Patches(nn.Module):
    """A vision transformer without transformers: fixed positions for 16 patches and a class token."""

    def __init__(self) -> None:
        super().__init__()
        self.img_size = 32
        self.patch = nn.Conv2d(3, 16, 8, 8)
        self.token = nn.Parameter(torch.zeros(1, 1, 16))
        self.pos_embed = nn.Parameter(torch.zeros(1, 17, 16))
        self.block = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        patches = self.patch(x).flatten(2).transpose(1, 2)
        return self.block(torch.cat([self.token.expand(len(x), -1, -1), patches], 1) + self.pos_embed)


class Regressor(nn.Module):
    """Vectors in a sequence: it attends, and begins with a Linear."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs = nn.Linear(6, 16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.inputs(x)
        return self.attention(hidden, hidden, hidden)[0]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 8))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 10)
    )


MODELS = {
    "llama": (llama, (8, 64, 512)),
    "t5": (partial(of_transformers, "T5ForConditionalGeneration", **T5), (8, 2048, 16384)),
    "bert": (partial(of_transformers, "BertForSequenceClassification", **BERT), (8, 40, 320)),
    "lora": (lora, (8, 64, 512)),
    "vit": (vit, (8, None, None)),
    "text and images": (llava, (8, 17, 136)),
    "positions begin behind the padding": (
        partial(of_transformers, "RobertaForMaskedLM", **BERT),
        (8, 38, 304),
    ),
    "block_size is of its sparse attention": (
        partial(of_transformers, "BigBirdForMaskedLM", **{**BERT, "vocab_size": 80, "block_size": 8}),
        (8, 40, 320),
    ),
    "decoder": (Decoder, (8, 24, 192)),
    "nanogpt": (NanoGpt, (8, 20, 160)),
    "patches": (Patches, (8, None, None)),
    "mlp": (mlp, (16384, None, 16384)),
    "cnn": (cnn, (8, None, None)),
}
"""Model, and the batch, sequence and tokens of what is made up for it."""


@pytest.mark.parametrize(("build", "sizes"), MODELS.values(), ids=MODELS)
def test_models_run_on_it(build: Callable[[], nn.Module], sizes: tuple[int | None, ...]) -> None:
    model = build()
    job = made(model, sequence=16 if 2048 in sizes else None)
    output = outputs(model, job.batch)
    if isinstance(job.batch, Mapping) and "labels" in job.batch:
        assert job.workload.loss_source == "output.loss"
        output = output.loss
    elif hasattr(output, "logits"):
        output = output.logits
    loss = output[1] if build is NanoGpt else output.mean()
    assert torch.isfinite(loss)
    loss.backward()
    full = made(model).workload
    assert (full.batch_size, full.sequence_length, full.tokens) == sizes
    assert full.batch_source == "made up"
    assert str(full.note).startswith("synthetic: ")


def test_an_encoder_of_images_tells_their_size_and_its_decoder_gets_none() -> None:
    transformers = pytest.importorskip("transformers")
    of_both = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(
        transformers.ViTConfig(**VISION), transformers.BertConfig(**BERT)
    )
    batch = made(transformers.VisionEncoderDecoderModel(of_both), size=2).batch
    assert {name: each.shape for name, each in batch.items()} == {"pixel_values": (2, 3, 32, 32)}


def test_an_encoder_decoder_without_a_head_gets_tokens_for_its_decoder() -> None:
    model = of_transformers("T5Model", **T5)
    job = made(model, size=2, sequence=8)
    assert set(job.batch) == {"input_ids", "decoder_input_ids"}
    outputs(model, job.batch)
    assert job.workload.loss_source == "mean"


def test_sizes_that_are_asked_for() -> None:
    model = llama()
    job = made(model, size=3, sequence=7)
    assert job.batch["input_ids"].shape == (3, 7)
    assert job.workload.note == "synthetic: 3 x 7 random tokens of a vocabulary of 128"
    assert made(mlp(), size=48).batch.shape == (48, 32)
    assert made(mlp(), size=4, sequence=5).batch.shape == (4, 5, 32)
    assert made(vit(), size=2).batch["pixel_values"].shape == (2, 3, 32, 32)


def test_a_batch_is_made_on_the_meta_device_for_a_model_there() -> None:
    with torch.device("meta"):
        model = llama()
    job = made(model)
    assert {tensor.device.type for tensor in job.batch.values()} == {"meta"}
    assert job.workload.tokens == 512
    with torch.device("meta"):
        assert made(mlp()).batch.device.type == "meta"
        assert made(llama().to_empty(device="cpu")).batch["input_ids"].device.type == "cpu"


def test_it_takes_the_dtype_of_the_parameters_and_looks_through_wrappers() -> None:
    model = mlp().to(torch.bfloat16)
    assert made(model).batch.dtype is torch.bfloat16
    assert made(torch.compile(model)).batch.dtype is torch.bfloat16
    assert made(nn.DataParallel(llama())).batch["labels"].shape == (8, 64)


def test_it_is_the_same_every_time_and_leaves_global_random_states_alone() -> None:
    model = llama()
    state, python_state = torch.random.get_rng_state(), random.getstate()
    first, second = made(model).batch, made(model).batch
    assert torch.equal(first["input_ids"], second["input_ids"])
    assert torch.equal(torch.random.get_rng_state(), state)
    assert random.getstate() == python_state


def test_a_model_of_timm_declares_its_images() -> None:
    model = TakesImages()
    model.pretrained_cfg = {"input_size": (3, 32, 32)}
    assert model(made(model).batch).shape == (8, 8, 8, 8)


class NeedsMore(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 8)

    def forward(self, ids: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        return self.embed(ids)


class Diffuses(nn.Module):
    """As diffusers' transformers: what is needed has a default."""

    def __init__(self) -> None:
        super().__init__()
        self.x_embedder = nn.Linear(8, 8)

    def forward(
        self, hidden_states: torch.Tensor, encoder_hidden_states: Any = None, timestep: Any = None
    ) -> torch.Tensor:
        return self.x_embedder(hidden_states)


class TakesImages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(48, 8)

    def forward(self, img: torch.Tensor) -> torch.Tensor:
        return self.embed(img.unfold(2, 4, 4).unfold(3, 4, 4).permute(0, 2, 3, 1, 4, 5).flatten(3))


class Rearrange(nn.Module):
    """As einops'."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.flatten(1, 2)


def unknown() -> Iterator[nn.Module]:
    yield from (NeedsMore(), Diffuses(), TakesImages(), nn.Sequential(nn.LazyLinear(8)), nn.Conv3d(1, 2, 3))
    yield Regressor()
    yield nn.Sequential(nn.Sequential(Rearrange(), nn.LayerNorm(8), nn.Linear(8, 8)), nn.Linear(8, 8))
    with torch.device("meta"):
        for name in ("DecisionTransformerModel", "CLIPModel", "SpeechT5ForTextToSpeech", "Wav2Vec2ForCTC"):
            yield of_transformers(name)


def test_inputs_of_other_kinds_are_asked_for() -> None:
    for model in unknown():
        workload = made(model).workload
        assert (workload.batch_source, workload.batch_size, workload.tokens) == (None, None, None), model
        assert "example_batch()" in str(workload.note), model


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (torch.zeros(4, 16, dtype=torch.int64), (4, 16, 64)),
        (torch.zeros(64, dtype=torch.int64), (None, None, 64)),
        (torch.zeros(4, 16, 32), (4, 16, 64)),
        (torch.zeros(32), (1, None, 1)),
        (torch.zeros(2, 3, 4, 32), (2, None, 24)),
        (torch.zeros(4, 1, 4, 8), (4, None, None)),  # images, whose forward may flatten them
        ((torch.zeros(4, 32), torch.zeros(4, dtype=torch.int64)), (4, None, 4)),
        ({"attention_mask": torch.ones(4, 16), "inputs_embeds": torch.zeros(4, 16, 32)}, (4, 16, 64)),
        ({"pixel_values": torch.zeros(2, 3, 8, 8), "input_ids": torch.zeros(2, 9).long()}, (2, 9, 18)),
        ({"input_ids": torch.zeros(2, 9).long(), "labels": torch.zeros(2, 5).long()}, (2, 9, None)),
        ((torch.zeros(4, 8).long(), torch.zeros(4, 32).long()), (4, 8, None)),  # of two encoders
        ((torch.zeros(8, 32), torch.zeros(64, 4)), (8, None, None)),  # nodes and edges of a graph
        ((), (None, None, None)),
        (
            torch.nested.nested_tensor([torch.zeros(3, 32), torch.zeros(5, 32)], layout=torch.jagged),
            (8, None, 8),
        ),
    ],
)
def test_the_size_of_a_given_batch_is_read_from_its_shapes(
    batch: Any, expected: tuple[int | None, ...]
) -> None:
    workload = made(mlp(), batch).workload
    assert (workload.batch_size, workload.sequence_length, workload.tokens) == expected
    assert (workload.batch_source, workload.note) == ("given", None)


def test_a_batch_without_a_shape_has_no_size() -> None:
    nested = torch.nested.nested_tensor([torch.zeros(3, 8), torch.zeros(5, 8)])
    assert made(mlp(), nested).workload.tokens is None
