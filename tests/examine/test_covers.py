"""What compiled regions and checkpointed ones cover of the module tree, and which blocks repeat."""

from __future__ import annotations

import torch
import torch.distributed
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper

from fp8doctor.facts import recorded
from tests.examine.models import (
    Block,
    Stacked,
    by_name,
    llama,
    network,
)


def test_compiled_model_covers_all_under_clean_names() -> None:
    model = Stacked()
    facts = network(torch.compile(model))
    assert facts.wrappers == ("OptimizedModule",)
    assert facts.kind == "tests.examine.models.Stacked"
    assert {each.compiled for each in facts.linears} == {""}
    assert facts.linears[0].name == "blocks.0.up"
    assert (facts.blocks[0].name, facts.blocks[0].compiled, facts.modules) == (
        "blocks",
        3,
        network(model).modules,
    )


def test_compiled_blocks_cover_themselves() -> None:
    model = Stacked()
    for block in model.blocks[:2]:
        block.compile()
    model.blocks[1].up.compile()
    linears = by_name(model)
    assert [linears[f"blocks.{i}.up"].compiled for i in range(3)] == ["blocks.0", "blocks.1.up", None]
    assert linears["head"].compiled is None
    assert network(model).blocks[0].compiled == 2


def test_compiled_step_covers_all() -> None:
    step = torch.compile(lambda model, batch: model(batch).mean())
    assert {each.compiled for each in network(Stacked(), training_step=step).linears} == {""}


def test_disabled_module_is_not_covered() -> None:
    model = Stacked()
    model.compile()
    model.blocks[1].forward = torch.compiler.disable(model.blocks[1].forward)
    linears = by_name(model)
    assert [linears[f"blocks.{i}.up"].compiled for i in range(3)] == ["", None, ""]


def test_checkpoint_wrappers() -> None:
    model = Stacked()
    for i in (0, 2):
        model.blocks[i] = checkpoint_wrapper(model.blocks[i], checkpoint_impl=CheckpointImpl.REENTRANT)
    facts = network(model)
    linears = {each.name: each for each in facts.linears}
    assert [linears[f"blocks.{i}.up"].checkpointed for i in range(3)] == ["blocks.0", None, "blocks.2"]
    assert (facts.blocks[0].checkpointed, facts.blocks[0].count) == (2, 3)
    assert facts.blocks[0].kind == "tests.examine.models.Block"


def test_huggingface_checkpointing() -> None:
    model = llama()
    model.activation_checkpointing_enable(every_n_layers=2)
    linears = by_name(model)
    assert linears["model.layers.0.mlp.up_proj"].checkpointed == "model.layers.0"
    assert linears["model.layers.1.mlp.up_proj"].checkpointed is None
    assert network(model).blocks[0].checkpointed == 1


def test_flag_on_the_model_covers_its_blocks() -> None:
    """Models of transformers before 4.53, and remote code today, decide above the list of blocks."""
    model = Stacked()
    model.gradient_checkpointing = True
    linears = by_name(model)
    assert [linears[name].checkpointed for name in ("blocks.0.up", "blocks.2.down", "head")] == [
        "blocks.0",
        "blocks.2",
        None,
    ]


class Calls(Stacked):
    """A user's own checkpointing, which only a run can see."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
        return self.head(self.norm(x))


def test_a_call_to_checkpoint_leaves_the_cover_unknown() -> None:
    facts = network(Calls())
    assert {recorded(each, "checkpointed") for each in facts.linears} == {False}
    assert not recorded(facts.blocks[0], "checkpointed")


def test_blocks_in_a_dictionary() -> None:
    """torchtitan keeps its layers in a ModuleDict."""
    model = nn.ModuleDict({"layers": nn.ModuleDict({str(i): Block() for i in range(2)})})
    (blocks,) = network(model).blocks
    assert (blocks.name, blocks.container, blocks.count) == ("layers", "ModuleDict", 2)


def test_bare_linears_are_no_blocks() -> None:
    assert network(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))).blocks == ()


def test_only_the_outermost_blocks_count() -> None:
    nested = nn.Sequential(*(nn.Sequential(Block(), Block()) for _ in range(2)))
    assert [(each.name, each.count) for each in network(nn.Sequential(nested, nn.ReLU())).blocks] == [
        ("0", 2)
    ]


def test_hooks() -> None:
    model = Stacked()
    model.blocks[0].register_forward_pre_hook(lambda module, arguments: None)
    model.head.register_forward_hook(lambda module, arguments, output: None)
    model.head.register_full_backward_hook(lambda module, given, taken: None)
    assert network(model).hooks == 3
