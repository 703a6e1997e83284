"""te-autocast: Transformer Engine's modules called under its FP8 autocast."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from fp8doctor.stacks import NoTwin
from fp8doctor.stacks.transformer_engine import STACK, autocast
from fp8doctor.trial.treatments.registry import Case, NotTried, treatment
from fp8doctor.trial.variant import Variant


@treatment("te-autocast", changes="the autocast")
def te_autocast(variant: Variant, case: Case) -> Variant:
    """Forward and loss under the autocast, with the recipe that TE chooses for this GPU."""
    if not any(linear.stack == STACK for linear in case.facts.network.linears):
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

    return replace(variant, around=around)
