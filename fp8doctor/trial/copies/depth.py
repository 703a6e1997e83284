"""Truncated models: repeated blocks are cut to a few depths, and the full step is extrapolated linearly.

One list of blocks has two depths and the line through both; an encoder and a decoder have one more cut per
list. A list in a regular pattern is cut in whole patterns; special blocks at its front stay.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from fp8doctor.errors import UserError
from fp8doctor.stacks.torch_private import CHECKPOINTED_CHILD, COMPILED_CHILD, FSDP1_CHILD
from fp8doctor.trial.copies.shards import is_stand_in

DEPTHS = ((4, 12), (2, 6), (1, 3))
"""Blocks kept at the two depths, then smaller pairs for little memory. Cuts to 4 and 12 predict an 8B Llama's
step within 1.4%, 2 and 6 within 3.2% (H200, research/benchmarks/results); 1 and 2 missed by up to 11%."""

DEPTHS_AS_ONE = (*DEPTHS[1:], (1, 2))
"""The same if a graph holds several blocks: it is compiled again at each depth, FP8 for 7 to 12 s a block."""

LEAST_WORTH_CUTTING, LEAST_AS_ONE = 25, 16
"""Shorter lists are measured whole. The second is for graphs of several blocks: twice both cuts."""

MOST_WHOLE = 32
"""Blocks of all lists up to which a model is measured whole, if the memory is large for it and no graph holds
several blocks. A Llama 3B took as long so, and was off by 0.7% instead of 4.1 (trial_jobs_h200.md)."""

WRAPPED = frozenset((COMPILED_CHILD, CHECKPOINTED_CHILD, FSDP1_CHILD))
"""Names under which ``torch.compile``, checkpoint and FSDP wrappers hold what they wrap."""

LIBRARIES = ("torch.", "torchao.", "transformer_engine.", "peft.")
"""Packages whose classes are compared by class and shape only: their attributes only number them."""

NUMBERING = re.compile(r"(^|_)(idx|index|id|number|name)$")
"""Attributes with a block's position, such as ``layer_idx``."""


@dataclass(frozen=True)
class Stack:
    """One list of repeated blocks: ``prefix`` special ones, then patterns of ``period`` blocks."""

    name: str
    count: int
    prefix: int
    period: int

    def keep(self, blocks: int) -> int:
        """Count what is kept: the special blocks, then at least ``blocks`` in whole patterns."""
        patterns = -(-blocks // self.period)
        return min(self.count, self.prefix + patterns * self.period)


Cut = Mapping[str, int]
"""List name -> number of its blocks that are kept, from the first on; the others are whole."""


def in_words(cut: Cut) -> str:
    return " + ".join(map(str, cut.values()))


@dataclass(frozen=True)
class Plan:
    """The cuts to time, and the extrapolation from their times to the whole model."""

    stacks: tuple[Stack, ...]
    cuts: tuple[Cut, ...]
    """The shallowest first; a single one is the whole model."""

    @property
    def whole(self) -> bool:
        return len(self.cuts) == 1

    def weights(self) -> tuple[float, ...]:
        """Return a coefficient per cut: of one list of n, (b - n) / (b - a) and (n - a) / (b - a)."""
        if self.whole:
            return (1.0,)
        base = self.cuts[0]
        slopes = [
            (stack.count - base[stack.name]) / (cut[stack.name] - base[stack.name])
            for stack, cut in zip(self.stacks, self.cuts[1:], strict=True)
        ]
        return (1.0 - sum(slopes), *slopes)

    def full(self, values: Sequence[float]) -> float:
        """Extrapolate to full depth from the values of the cuts, in their order."""
        return sum(weight * value for weight, value in zip(self.weights(), values, strict=True))


WHOLE = Plan((), ({},))


def cleaned(name: str) -> str:
    """Write a module's name as the facts do, without the children of wrappers."""
    return ".".join(part for part in name.split(".") if part not in WRAPPED)


def named_in(model: nn.Module, lists: Iterable[str]) -> list[str]:
    """Translate names of lists in the facts to names in the model."""
    names = {cleaned(name): name for name, _ in model.named_modules()}
    return [names[name] for name in lists if name in names]


def plans(
    model: nn.Module, lists: Sequence[str], *, as_one: bool = False, own: bool = False, roomy: bool = False
) -> list[Plan]:
    """Plan the cuts, then smaller ones for little memory; first none, if no list is worth cutting.

    ``as_one`` says that a graph holds several blocks, ``own`` that the user's takes long to compile, so cuts
    that compile half of the blocks are worth it. ``roomy`` says that the memory is large for the model.
    """
    stacks = [stack for name in lists if (stack := _stack(name, model.get_submodule(name)))]
    least, pairs = (LEAST_AS_ONE, DEPTHS_AS_ONE) if as_one else (LEAST_WORTH_CUTTING, DEPTHS)
    worth = [stack for stack in stacks if stack.count >= least]
    short = not worth or (roomy and not as_one and sum(stack.count for stack in stacks) <= MOST_WHOLE)
    there = not any(each.is_meta and not is_stand_in(each) for each in model.parameters())
    found = list[Plan]()
    for shallow, deep in pairs:
        second = {each.name: each.keep(max(deep, shallow + each.period)) for each in worth or stacks}
        usable = [each for each in worth or stacks if each.keep(shallow) < second[each.name] < each.count]
        base = {each.name: each.keep(shallow) for each in usable}
        made = Plan((*usable,), (base, *({**base, each.name: second[each.name]} for each in usable)))
        if usable and made not in found:
            found.append(made)
    blocks = sum(stack.count for stack in stacks)
    halves = [each for each in found if own and 2 * sum(sum(cut.values()) for cut in each.cuts) <= blocks]
    return halves or [*([WHOLE] if (short and there) or not found else []), *found]


def first_blocks(model: nn.Module, lists: Sequence[str], blocks: int) -> Plan:
    """Plan one cut that keeps the first blocks of every longer list, in whole patterns."""
    found = (stack for name in lists if (stack := _stack(name, model.get_submodule(name))))
    longer = tuple(stack for stack in found if stack.keep(blocks) < stack.count)
    return Plan(longer, ({stack.name: stack.keep(blocks) for stack in longer},))


def compare(whole: nn.Module, cut: nn.Module, name: str, blocks: int) -> None:
    """Raise `UserError` if ``cut`` has other parameters than ``whole`` with ``blocks`` blocks in ``name``."""
    count = len(list(whole.get_submodule(name).children()))
    dropped = tuple(f"{cleaned(name)}.{i}." for i in range(blocks, count))
    expected = {key: value for key, value in _kinds(whole).items() if not key.startswith(dropped)}
    if wrong := sorted({key for key, _ in expected.items() ^ _kinds(cut).items()}):
        raise UserError(f"its parameter {wrong[0]} is not as in the whole model")


def _kinds(model: nn.Module) -> dict[str, tuple[object, ...]]:
    """Map the name of every parameter to its shape and kind."""
    return {
        cleaned(name): (tuple(parameter.shape), parameter.dtype, parameter.requires_grad)
        for name, parameter in model.named_parameters()
    }


def _stack(name: str, blocks: nn.Module) -> Stack | None:
    """Compare blocks by their work: classes, parameter shapes, and plain settings such as ``layer_type``."""
    if type(blocks) not in (nn.ModuleList, nn.Sequential):
        return None
    signatures = [
        (
            [type(module).__qualname__ for module in block.modules()],
            _kinds(block),
            [
                (name, key, value)
                for name, module in block.named_modules()
                if not type(module).__module__.startswith(LIBRARIES)
                for key, value in sorted(vars(module).items())
                if isinstance(value, (bool, str, int)) and not key.startswith("_")
                if not NUMBERING.search(key)
            ],
        )
        for block in blocks.children()
    ]
    for prefix in range(min(len(signatures), 4)):
        rest = signatures[prefix:]
        for period in range(1, min(8, len(rest) // 2) + 1):
            if rest == rest[:period] * (len(rest) // period):
                return Stack(name, len(signatures), prefix, period)
    return None
