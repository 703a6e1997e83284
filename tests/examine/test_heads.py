"""Heads, routers and experts; and blocks of several classes that take turns."""

from collections.abc import Callable

import pytest
import torch
import transformers
from torch import nn

from tests.examine.models import Block, llama, network


class Around(nn.Module):
    """A model that does not say what its parts are for: they are called as they are named."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)


def encoder() -> nn.Module:
    return nn.ModuleList(Block() for _ in range(2))


def two() -> nn.Module:
    """A student and its teacher, as wide as the vocabulary at their ends."""
    student, teacher = llama(), llama()
    return Around(student=student, teacher=teacher.requires_grad_(False))


def vgg() -> nn.Module:
    """As torchvision's."""
    layers = (nn.Linear(512, 64), nn.ReLU(), nn.Dropout(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    features = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
    return Around(features=features, classifier=nn.Sequential(*layers))


def several() -> nn.Module:
    """Of several steps ahead, or of codebooks."""
    ends = nn.ModuleList(nn.Linear(32, 64) for _ in range(2))
    return Around(embed=nn.Embedding(64, 32), layers=encoder(), ends=ends)


@pytest.mark.parametrize(
    ("build", "heads"),
    [
        (lambda: Around(layers=encoder(), mlp_head=nn.Linear(32, 10)), ["mlp_head"]),
        (lambda: Around(layers=encoder(), head=Around(fc=nn.Linear(32, 10))), ["head.fc"]),
        (vgg, ["classifier.5"]),
        (several, ["ends.0", "ends.1"]),
        (two, ["student.lm_head", "teacher.lm_head"]),
    ],
)
def test_the_head_is_what_ends_the_model(build: Callable[[], nn.Module], heads: list[str]) -> None:
    assert [each.name for each in network(build()).linears if each.role == "head"] == heads


@pytest.mark.parametrize(
    "model",
    [
        Around(layers=encoder(), pooler=nn.Linear(32, 32)),
        Around(layers=encoder()),
        Around(embed=nn.Embedding(128, 32), layers=encoder(), pooler=nn.Linear(32, 16)),  # blocks as wide
        Around(qkv=nn.Linear(32, 96), layers=encoder()),
        nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 48)),
    ],
)
def test_what_may_be_the_body_is_no_head(model: nn.Module) -> None:
    assert {each.role for each in network(model).linears} == {"body"}


def test_blocks_of_several_classes_that_take_turns() -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 8, "num_attention_heads": 4}
    with torch.device("meta"):
        model = transformers.JambaForCausalLM(transformers.JambaConfig(**sizes, num_experts=1))
        (blocks,) = network(model).blocks
    told = blocks.name, blocks.count, blocks.kind.rpartition(".")[2]
    assert told == ("model.layers", 8, "JambaMambaDecoderLayer")


def behind_a_gate(**parts: nn.Module) -> nn.Module:
    layer = Around(gating=nn.Linear(32, 4, bias=False), **parts)
    layer.top_k = 2  # type: ignore[assignment]
    return Around(layer=layer)


def one_by_one() -> nn.Module:
    """Experts that a class of the user's holds as children of their own."""
    return behind_a_gate(bank=Around(**{f"expert_{i}": Block() for i in range(4)}))


def test_experts_that_are_children() -> None:
    facts = network(one_by_one())
    router, *experts = facts.linears
    assert router.role == "router"
    assert {each.role for each in experts} == {"experts"}
    assert len(experts) == 8
    assert {each.flops_per_token for each in experts} == {6 * 32 * 128 * 2 / 4}
    assert facts.blocks == ()


def test_every_token_visits_shared_experts() -> None:
    shared = nn.ModuleList(Block() for _ in range(2))
    experts = nn.ModuleList(Block() for _ in range(4))
    linears = {
        each.name: each for each in network(behind_a_gate(experts=experts, shared_experts=shared)).linears
    }
    assert linears["layer.gating"].role == "router"
    assert linears["layer.experts.0.up"].flops_per_token == 6 * 32 * 128 * 2 / 4
    assert linears["layer.shared_experts.0.up"].role == "body"
    assert linears["layer.shared_experts.0.up"].flops_per_token == 6 * 32 * 128


def test_a_projection_as_wide_as_there_are_experts_is_no_router() -> None:
    """Keys of 128 features and 128 experts, say."""
    attention = Around(q=nn.Linear(32, 32), k=nn.Linear(32, 4), o=nn.Linear(32, 32))
    moe = behind_a_gate(experts=nn.ModuleList(Block() for _ in range(4)))
    roles = {each.name: each.role for each in network(Around(attention=attention, moe=moe)).linears}
    assert roles["attention.k"] == "body"
    assert roles["moe.layer.gating"] == "router"
