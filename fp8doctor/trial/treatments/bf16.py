"""keep-in-bf16, stay-in-bf16: some FP8 layers, or all of them, back in BF16."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from torch import nn

from fp8doctor.stacks import NoTwin, bf16_twin
from fp8doctor.trial.treatments.compilation import block_by_block, strip_compile_marks
from fp8doctor.trial.treatments.registry import NotTried, TreatmentContext, carries_out, swap
from fp8doctor.trial.variant import Variant


@carries_out("keep-in-bf16")
def keep_in_bf16(variant: Variant, context: TreatmentContext) -> Variant:
    """Leave the named layers as a filter of the conversion would have left them."""
    if not context.layers:
        raise NotTried("the finding names no layers")
    covered = {linear.name for linear in context.facts.network.linears if linear.compiled is not None}
    return replace(
        variant,
        model=to_bf16(
            variant.model, compiled=bool(covered.intersection(context.layers)), only=context.layers
        ),
    )


@carries_out("stay-in-bf16")
def stay_in_bf16(variant: Variant, context: TreatmentContext) -> Variant:
    """Leave no layer in FP8, and compile."""
    return replace(
        variant,
        model=block_by_block(to_bf16(strip_compile_marks(variant.model), compiled=True), context.facts),
    )


def to_bf16(model: nn.Module, compiled: bool = False, only: Collection[str] | None = None) -> nn.Module:
    """Replace every FP8 training layer, or those named in ``only``, by its BF16 twin over the same
    Parameters.

    ``compiled`` says whether torch.compile will cover them. Raises `NotTried` where a layer has no twin, or
    none is left of the named ones in a cut of the model.
    """
    done = 0

    def twin(name: str, module: nn.Module) -> nn.Module | None:
        nonlocal done
        if only is not None and not belongs(name, only):
            return None
        try:
            found = bf16_twin(module, compiled)
        except NoTwin as error:
            raise NotTried(str(error)) from None
        done += found is not None
        return found

    model = swap(model, twin)
    if only is not None and not done:
        raise NotTried("none of its layers is in FP8 in the part of the model that is timed")
    return model


def belongs(name: str, only: Collection[str]) -> bool:
    """Whether a module is named: by itself, by a part of it such as ``mlp.fc1``, or by a module that holds
    it."""
    return (
        any(name == each or each.startswith(f"{name}.") or name.startswith(f"{each}.") for each in only)
        if name
        else False
    )
