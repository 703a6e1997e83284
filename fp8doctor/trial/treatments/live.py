"""A prescription carried out on the user's own model, by the very functions that were timed."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

from torch import nn

from fp8doctor.analysis.layers import KEEP_IT_IN_MODULE
from fp8doctor.analysis.treatment_table import TREATMENTS, traits
from fp8doctor.facts import Facts
from fp8doctor.finding import Treatment
from fp8doctor.stacks.torch_private import behind_compile
from fp8doctor.trial.treatments.registry import NotTried, TreatmentContext, function_of, known
from fp8doctor.trial.variant import Variant


def carry_out(prescribed: Iterable[Treatment], model: nn.Module, facts: Facts) -> nn.Module:
    """Change ``model``, in place where that is possible, and return it, or what stands for it now.

    One warning names what was not carried out and why, and says when the optimizer has to be made anew.
    """
    prescribed = tuple(prescribed)
    left = [f"{each.name} (by hand: {each.summary})" for each in prescribed if each.name not in TREATMENTS]
    before = [id(parameter) for parameter in model.parameters()]
    for each in known(prescribed):
        changes = traits(each.name).changes
        if changes != "model":
            left.append(f"{each.name} (it changes {changes})")
            continue
        try:
            root = root_of(model)
            model = put_back(
                model,
                root,
                function_of(each.name)(
                    Variant(root, batch=None), TreatmentContext(facts, each.name, each.layers)
                ).model,
            )
        except NotTried as error:
            left.append(f"{each.name} ({error})")
    said = [f"fp8doctor did not carry out {', '.join(left)}"] if left else []
    if set(map(id, model.parameters())) - set(before):
        said.append("parameters were replaced: make the optimizer anew")
    if said:
        warnings.warn("; ".join(said), stacklevel=3)
    return model


def root_of(model: nn.Module) -> nn.Module:
    """Return the model behind DistributedDataParallel and its like, whose names the facts have.

    One that torch.compile wraps stays wrapped.
    """
    held = behind_compile(model)
    inside = model if held is None else held
    if type(inside).__name__ in KEEP_IT_IN_MODULE:
        return root_of(inside.module)  # type: ignore[arg-type]
    return model


def put_back(model: nn.Module, root: nn.Module, changed: nn.Module) -> nn.Module:
    """Put what stands for the model's root now inside DistributedDataParallel and its like."""
    holder = next(
        (module for module in model.modules() if root is not model and module._modules.get("module") is root),
        None,
    )
    if changed is root or holder is None:
        return model if changed is root else changed
    holder.module = changed
    return model
