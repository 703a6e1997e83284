"""Random trees of modules that misbehave when they are looked at carelessly."""

from __future__ import annotations

import functools
import gc
import random
from collections import OrderedDict, UserDict, deque
from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from fp8doctor import inspect_model
from research.reliability.count import Count
from research.reliability.everything import differences, everything, surroundings

RAN: list[str] = []
"""What of a user's code ran."""


def counted(name: str, value: Any = None) -> Any:
    """A property that counts, and keeps what is assigned where ``nn.Module`` looks for it."""
    state = nn.Module.__dict__["__dict__"].__get__

    def get(self: Any) -> Any:
        RAN.append(name)
        return state(self) if name == "__dict__" else state(self).get(name, value)

    return property(get, lambda self, new: state(self).__setitem__(name, new))


class Noisy(nn.Module):
    """A parametrization that draws and counts."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        RAN.append("parametrization")
        return weight + torch.randn_like(weight)


def noisy(name: str = "weight") -> nn.Module:
    layer = nn.Linear(8, 16)
    parametrize.register_parametrization(layer, name, Noisy(), unsafe=True)
    RAN.clear()
    return layer


class Asking(nn.Linear):
    """A layer whose ``__getattr__`` is the user's."""

    def __getattr__(self, name: str) -> Any:
        RAN.append(name)
        return super().__getattr__(name)


class Counting(nn.Module):
    """Attributes that somebody may read, each with an effect."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.drawn = torch.Generator().manual_seed(1)

    num_embeddings = counted("num_embeddings", 7)
    in_features = counted("in_features", 7)
    config = counted("config")
    weight = counted("weight")

    def forward(self, x: Any) -> Any:
        RAN.append("forward")
        return self.inner(x)


class Drawing(nn.Module):
    """Whoever asks it for what it has not, draws random numbers."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        if name in ("inner", "training", "weight", "bias"):
            return super().__getattr__(name)
        RAN.append(name)
        torch.rand(1)
        random.random()
        numpy.random.rand()
        raise AttributeError(name)


class Odd(nn.Sequential):
    """A container that counts when it is asked what a container is asked."""

    def __iter__(self) -> Any:
        RAN.append("__iter__")
        return super().__iter__()

    def __len__(self) -> int:
        RAN.append("__len__")
        return super().__len__()

    def __eq__(self, other: object) -> bool:
        RAN.append("__eq__")
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        RAN.append("__repr__")
        return "Odd()"


class Holding(nn.Module):
    """State of many kinds beside its modules."""

    def __init__(self, inside: list[nn.Module]) -> None:
        super().__init__()
        self.inside = nn.ModuleList(inside)
        self.hidden = list(inside[:1]), {"again": inside[-1]}
        self.seen: deque[int] = deque([1, 2], maxlen=2)
        self.numbers, self.dice = numpy.random.default_rng(1), random.Random(1)
        self.settings, self.lines = UserDict(rate=1), iter([1, 2, 3])
        self.register_buffer("scale", torch.ones(8))
        self.register_buffer("phase", torch.ones(2, dtype=torch.complex64), persistent=False)
        self.register_buffer("nothing", None)
        self.register_module("nobody", None)
        self.bag = nn.ParameterDict({"a": torch.ones(2)})
        self.parts = nn.ParameterList([torch.ones(3), torch.ones(2, dtype=torch.bfloat16)])


def hooked(inner: nn.Module) -> nn.Module:
    """Every kind of hook, each of which counts."""

    def ran(*arguments: Any) -> None:
        RAN.append("hook")

    inner.register_forward_pre_hook(ran)
    inner.register_forward_hook(ran)
    inner.register_full_backward_hook(ran)
    inner.register_load_state_dict_post_hook(ran)
    inner._register_state_dict_hook(ran)
    for parameter in nn.Module.parameters(inner):
        if parameter.requires_grad and type(parameter) is nn.Parameter:
            parameter.register_hook(ran)
            parameter.register_post_accumulate_grad_hook(ran)
    return inner


def tied(inside: list[nn.Module]) -> nn.Module:
    """Two layers with one weight, which has a gradient."""
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)
    second.weight = first.weight
    first.weight.grad = torch.ones(8, 8)
    return nn.Sequential(first, *inside, second)


def turning(inside: list[nn.Module]) -> nn.Module:
    """A child that holds its parent."""
    parent, child = nn.Sequential(*inside), nn.Linear(8, 8)
    object.__getattribute__(child, "__dict__")["parent"] = parent
    child.register_module("above", parent)
    return nn.Sequential(parent, child)


def overwritten(inside: list[nn.Module]) -> nn.Module:
    """A forward put over the class's, as Accelerate does."""
    module = nn.Sequential(*inside)
    module.forward = functools.partial(hooked, module)  # type: ignore[method-assign]
    return module


def compiled(inside: list[nn.Module]) -> nn.Module:
    """A list of blocks that are compiled in place."""
    for each in inside:
        if isinstance(each, nn.Sequential):
            each.compile(backend="eager")
    return nn.ModuleList(inside)


def float8(recipe: str) -> nn.Module:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name(recipe)
    return convert_to_float8_training(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 32)), config=config)


def adapted() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(
        nn.Sequential(OrderedDict(q=nn.Linear(8, 8))), LoraConfig(r=2, target_modules=["q"])
    )  # type: ignore[arg-type]


def kind_of(name: str, of: type[nn.Module], **members: Any) -> Callable[[], nn.Module]:
    """What makes one of a class with these members."""
    sizes = (8, 8) if issubclass(of, nn.Linear) else ()
    return lambda: type(name, (of,), members)(*sizes)


LEAVES: dict[str, Callable[[], nn.Module]] = {
    "Linear": lambda: nn.Linear(8, 8),
    "without a bias": lambda: nn.Linear(8, 8, bias=False),
    "frozen": lambda: nn.Linear(8, 8).requires_grad_(False),
    "in BF16": lambda: nn.Linear(16, 16).bfloat16(),
    "on the meta device": lambda: nn.Linear(16, 16, device="meta"),
    "lazy": lambda: nn.LazyLinear(8),
    "embedding": lambda: nn.Embedding(16, 8),
    "convolution": lambda: nn.Conv2d(3, 8, 3),
    "batch norm": lambda: nn.BatchNorm1d(8),
    "attention": lambda: nn.MultiheadAttention(8, 2),
    "encoder layer": lambda: nn.TransformerEncoderLayer(8, 2, 16),
    "LSTM": lambda: nn.LSTM(8, 8),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(8, 8)),
    "old spectral norm": lambda: nn.utils.spectral_norm(nn.Linear(8, 8)),
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(8, 8)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(8, 8)),
    "noisy weight": noisy,
    "noisy bias": lambda: noisy("bias"),
    "__getattr__": lambda: Asking(8, 8),
    "TorchScript": lambda: torch.jit.script(nn.Linear(8, 8)),
    "traced": lambda: torch.jit.trace(nn.Linear(8, 8), torch.ones(1, 8)),  # type: ignore[no-any-return,no-untyped-call]
    "compiled": lambda: torch.compile(nn.Linear(8, 8), backend="eager"),  # type: ignore[dict-item]
    "float8, tensorwise": lambda: float8("tensorwise"),
    "float8, rowwise": lambda: float8("rowwise"),
    "PEFT": adapted,
    "no module": kind_of("Nowhere", nn.Linear, __module__=None),
    "property": kind_of("Property", nn.Module, _orig_mod=counted("_orig_mod")),
    "property on a layer": kind_of(
        "Features", nn.Linear, training=counted("training"), forward=counted("forward")
    ),
    "a class that lies": kind_of("Liar", nn.Module, __class__=property(lambda self: nn.Linear)),
    "nothing": nn.Identity,
}
AROUND: dict[str, Callable[[list[nn.Module]], nn.Module]] = {
    "Sequential": lambda inside: nn.Sequential(*inside),
    "ModuleList": nn.ModuleList,
    "ModuleDict": lambda inside: nn.ModuleDict({f"m{i}": each for i, each in enumerate(inside)}),
    "twice": lambda inside: nn.ModuleList([*inside, *inside]),
    "counting": lambda inside: Counting(nn.Sequential(*inside)),
    "drawing": lambda inside: Drawing(nn.ModuleList(inside)),
    "hooks": lambda inside: hooked(nn.Sequential(*inside)),
    "odd container": lambda inside: Odd(*inside),
    "state of many kinds": Holding,
    "ties": tied,
    "a circle": turning,
    "a forward of its own": overwritten,
    "compiled blocks": compiled,
    "eval": lambda inside: nn.Sequential(*inside).eval(),
}

MOST_LEAVES = 12


def tree(how: random.Random) -> tuple[str, nn.Module]:
    """A tree and its shape in words."""
    left = [how.randint(1, MOST_LEAVES)]

    def grown(depth: int) -> tuple[str, nn.Module]:
        left[0] -= 1
        if depth == 0 or left[0] <= 0 or how.random() < 0.4:
            name = how.choice(list(LEAVES))
            return name, LEAVES[name]()
        name = how.choice(list(AROUND))
        inside = [grown(depth - 1) for _ in range(how.randint(1, 4))]
        return f"{name}({', '.join(word for word, _ in inside)})", AROUND[name]([each for _, each in inside])

    words, model = grown(4)
    return words, nn.Sequential(model, nn.Linear(8, 8))


def looks(tries: int, seed: int = 0) -> Count:
    """So many random trees looked at: nothing of the user's ran, and everything is as it was."""
    count, how = Count("a random tree of modules looked at"), random.Random(seed)
    for number in range(tries):
        torch.manual_seed(number)
        words, model = tree(how)
        RAN.clear()
        before = everything(model), surroundings()
        assert not RAN, "the digest ran it"
        with count.attempt(words) as why:
            inspect_model(model, trial=False)
            why += [f"{each} changed" for each in differences(before[0], everything(model))]
            why += [f"{each} changed" for each in differences(before[1], surroundings())]
            why += [f"{each} ran" for each in dict.fromkeys(RAN)]
        if number % 500 == 499:
            torch._dynamo.reset()
            gc.collect()
    return count
