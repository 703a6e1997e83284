"""te-autocast: Transformer Engine's modules called under its FP8 autocast."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from fp8doctor.stacks import NoTwin
from fp8doctor.stacks.te_private import autocast_is_open
from fp8doctor.stacks.transformer_engine import STACK, autocast, recognise, within
from fp8doctor.trial.treatments.registry import NotTried, TreatmentContext
from fp8doctor.trial.variant import Variant


def te_autocast(variant: Variant, context: TreatmentContext) -> Variant:
    """Run forward and loss under the autocast, with the recipe that TE chooses for this GPU.

    A layer opens it again where the model's own code closes it (``te.autocast(enabled=self.fp8)``).
    """
    if not any(linear.stack == STACK for linear in context.facts.network.linears):
        raise NotTried("the model holds no layer of Transformer Engine")
    try:
        opened = autocast()
    except NoTwin as error:
        raise NotTried(str(error)) from None
    outer = variant.around

    @contextmanager
    def around() -> Iterator[None]:
        with outer(), opened(enabled=True):
            yield

    def opened_again() -> AbstractContextManager[Any]:
        return nullcontext() if autocast_is_open() else opened(enabled=True)

    for module in variant.model.modules():
        if recognise(module, {}):
            within(module, opened_again)
    return replace(variant, around=around)
