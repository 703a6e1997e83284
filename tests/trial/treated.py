"""A treatment carried out on a replica, and what the facts of a model tell of it."""

from typing import Any

import torch
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

from fp8doctor.facts import Facts
from fp8doctor.loading.job import Job
from fp8doctor.trial.copies.replica import replicate
from fp8doctor.trial.copies.step import Variant
from fp8doctor.trial.treatments.apply import TreatmentContext, function_of
from tests.examine.models import network, training

TOKENS = {"input_ids": torch.arange(32).reshape(2, 16), "labels": torch.arange(32).reshape(2, 16)}


def facts(model: nn.Module) -> Facts:
    return Facts(network=network(model), training=training(model))


def applied(
    name: str,
    model: nn.Module,
    *layers: str,
    batch: Any = None,
    job: Job | None = None,
    known: Facts | None = None,
) -> Variant:
    """A treatment carried out on a replica that shares the model's Parameters."""
    replica = replicate(model, share=True)[0]
    context = TreatmentContext(known or facts(model), name, layers, job)
    return function_of(name)(Variant(replica, batch), context)


def float8(model: nn.Module, **settings: Any) -> nn.Module:
    return convert_to_float8_training(
        model, config=Float8LinearConfig(**settings), module_filter_fn=lambda layer, name: "head" not in name
    )


def in_fp8(model: nn.Module) -> dict[str, str | None]:
    """Recipe by name of every layer that trains in FP8."""
    return {linear.name: linear.recipe for linear in network(model).linears if linear.use == "training"}


def same_parameters(one: nn.Module, other: nn.Module) -> bool:
    return all(a is b for a, b in zip(one.parameters(), other.parameters(), strict=True))
