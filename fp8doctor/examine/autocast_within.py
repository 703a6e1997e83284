"""An autocast that the user's own code opens inside the step, which no look from outside can see in force.

Transformer Engine's, of the same name, changes no dtype of torch's own operators.
"""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType
from typing import Any

import torch

from fp8doctor.examine.checkpoint_calls import LIBRARIES
from fp8doctor.examine.checkpointing import TRANSFORMER_ENGINE, package
from fp8doctor.examine.compile_marks import chain
from fp8doctor.examine.walk import Tree
from fp8doctor.stacks.code_names import names_in, owners
from fp8doctor.stacks.lineage import home
from fp8doctor.stacks.looking import forward_of, read


def opens_autocast(tree: Tree, training_step: Callable[..., Any] | None) -> bool:
    """Whether the training step, or a forward that is no library's, names ``autocast`` or uses a name that is
    bound to one."""
    modules = [module for place in tree.places for module in (*place.wrappers, place.module)]
    own = {type(module): module for module in modules if not home(type(module)).startswith(LIBRARIES)}
    forwards = [forward_of(module) for module in own.values()]
    return any(_opens(link) for function in (training_step, *forwards) for link in chain(function))


def _opens(link: Any) -> bool:
    function = read(link, "_torchdynamo_orig_callable", link)
    function = read(function, "__func__", function)
    code = read(function, "__code__")
    if not isinstance(code, CodeType):
        return False
    used = set(names_in(code))
    of_others = {name for name in used if package(function.__globals__.get(name)) == TRANSFORMER_ENGINE}
    bound = [function.__globals__[name] for name in used if name in function.__globals__]
    bound += [cell.cell_contents for cell in function.__closure__ or () if cell != type(cell)()]
    return not of_others.issuperset(owners("autocast", code)) or any(
        isinstance(value, torch.autocast) for value in bound
    )
