"""Replicas of real models: they run themselves, keep every mark, and the guard catches those that do not."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.eval_frame import _debug_get_cache_entry_list

from fp8doctor.facts import Target, Workload
from fp8doctor.loading.job import Job
from fp8doctor.stacks.torch_private import context_of
from fp8doctor.trial.copies.compiling import give_own_code
from fp8doctor.trial.copies.replica import NotReplicable, replicate
from fp8doctor.trial.state.guard import Guard
from tests.examine.models import Block, llama


class Stack(nn.Module):
    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


X = torch.ones(4, 32)


@contextmanager
def guarded(original: nn.Module) -> Iterator[None]:
    guard = Guard(Job(model=original, target=Target(), workload=Workload()))
    with guard.standing(), guard.armed():
        yield


def runs_itself(original: nn.Module, replica: nn.Module, x: Any = X) -> None:
    """The replica takes a step without the original noticing, gives the same output, and follows its own
    weights."""
    with guarded(original):
        output = replica(x)
        output.sum().backward()
    assert torch.equal(output, original(x))
    assert all(parameter.grad is None for parameter in original.parameters())
    with torch.no_grad():
        for parameter in replica.parameters():
            parameter.zero_()
    assert not torch.equal(replica(x), original(x))


def calling(forward: Any) -> Any:
    @functools.wraps(forward)
    def inner(*arguments: Any) -> Any:
        return forward(*arguments)

    return inner


def naming_itself(forward: Any) -> Any:
    """As a decorator of transformers does; whoever follows its closure comes back to it."""

    def inner(*arguments: Any) -> Any:
        inner.calls.append(inner)  # type: ignore[attr-defined]
        return forward(*arguments)

    inner.calls = []  # type: ignore[attr-defined]
    return inner


def calling_itself(inner: Any) -> Any:
    """A forward that names itself, and a cell that nothing was put into."""

    def forward(x: torch.Tensor, again: bool = True) -> torch.Tensor:
        return forward(x, again=False) if again else inner(x) if inner else never

    if not inner:
        never = X
    return forward


def by_default(forward: Any) -> Any:
    return lambda x, inner=forward: inner(x)


@pytest.mark.parametrize(
    "wrap", [calling, calling_itself, lambda it: calling(calling(it)), naming_itself, by_default]
)
def test_a_wrapper_of_forward_is_rebuilt_around_the_copy(wrap: Any) -> None:
    model: Any = Stack()
    model.forward = wrap(model.forward)
    replica: Any = replicate(model)[0]
    runs_itself(model, replica)
    assert replica.forward is not model.forward


COMPILE = functools.partial(torch.compile, backend="aot_eager", dynamic=False)


def in_place(model: Any) -> Any:
    model.compile(backend="aot_eager", dynamic=False)
    return model


def per_block(model: Any) -> Any:
    for block in model.blocks:
        in_place(block)
    return model


def assigned(model: Any) -> Any:
    model.forward = COMPILE(model.forward)
    return model


@pytest.mark.parametrize(
    ("form", "place"),
    [
        (COMPILE, lambda replica: replica),
        (in_place, lambda replica: replica._compiled_call_impl),
        (per_block, lambda replica: replica.blocks[0]._compiled_call_impl),
        (assigned, lambda replica: replica.forward),
    ],
    ids=["wrapped", "in_place", "per_block", "assigned"],
)
@pytest.mark.slow
def test_every_form_of_compile_is_applied_to_the_copy_with_its_settings(form: Any, place: Any) -> None:
    torch._dynamo.reset()
    model = form(Stack())
    replica: Any = replicate(model)[0]
    compiled = place(replica)
    context = context_of(compiled)
    assert context is not None
    assert context._dynamic is False  # type: ignore[attr-defined]
    give_own_code(replica)
    before = len(_debug_get_cache_entry_list(Block.forward.__code__)) + len(
        _debug_get_cache_entry_list(Stack.forward.__code__)
    )
    runs_itself(getattr(model, "_orig_mod", model), replica)
    assert before == 0


def test_ties_stay_and_nothing_is_shared_unless_asked() -> None:
    model = llama(tie_word_embeddings=True)
    replica: Any = replicate(model)[0]
    assert replica.lm_head.weight is replica.model.embed_tokens.weight
    assert {id(p) for p in replica.parameters()}.isdisjoint({id(p) for p in model.parameters()})
    shared: Any = replicate(model, share=True)[0]
    assert [id(p) for p in shared.parameters()] == [id(p) for p in model.parameters()]
    assert shared.model.layers[0] is not model.model.layers[0]


def test_a_cut_keeps_the_first_blocks_and_never_copies_the_others() -> None:
    model = Stack(6)
    replica, memo = replicate(model, cuts={"blocks": 2})
    assert len(replica.blocks) == 2
    assert id(model.blocks[5].up.weight) not in memo
    assert torch.equal(replica.blocks[1].up.weight, model.blocks[1].up.weight)
    assert len(model.blocks) == 6


def test_the_users_hooks_are_left_out_and_torchs_own_stay() -> None:
    model, seen = Stack(), []
    model.blocks[0].register_forward_hook(lambda *arguments: seen.append(1))
    torch.nn.utils.parametrizations.weight_norm(model.blocks[1].up)
    replica = replicate(model)[0]
    replica(X)
    assert seen == []
    assert torch.equal(replica(X), model(X))
    assert seen == [1]


def test_what_cannot_be_copied_is_named() -> None:
    model = Stack()
    model.lock = __import__("threading").Lock()  # type: ignore[assignment]
    with pytest.raises(NotReplicable, match="cannot pickle"):
        replicate(model)
    with torch.device("meta"):
        nowhere = Stack()
    with pytest.raises(NotReplicable, match=r"blocks\.0\.up\.weight has no data"):
        replicate(nowhere, device=torch.device("cpu"))
