"""A small decoder, jobs that train it in FP8, and trials of them on a CPU."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torchao.float8 import convert_to_float8_training

from fp8doctor.facts import Arm, Facts, Target, Trial, Workload
from fp8doctor.loading.job import Job
from fp8doctor.trial.copies.step import Change, VariantPlan, as_it_is
from fp8doctor.trial.measure.budget import Budget, TrialRun
from fp8doctor.trial.treatments.forms import compile_blocks, in_form
from tests.trial.conducted import conduct

CPU = torch.device("cpu")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.silu(self.up(self.norm(x))))


class Decoder(nn.Module):
    def __init__(self, blocks: int = 12, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(96, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(width, 96, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.dropout(x))


def job(blocks: int = 26, **settings: Any) -> Job:
    model = convert_to_float8_training(
        Decoder(blocks).bfloat16(), module_filter_fn=lambda layer, name: name != "head"
    )
    batch = torch.randint(0, 96, (1, 16))
    loss = lambda output, batch: nn.functional.cross_entropy(output.flatten(0, 1).float(), batch.flatten())  # noqa: E731
    return Job(
        **{
            "model": model,
            "target": Target(),
            "workload": Workload(accumulate=1, batch_source="given"),
            "batch": batch,
            "loss": loss,
            **settings,
        }
    )


def on_model(change: Callable[..., nn.Module], **settings: Any) -> Change:
    """A change of the model as one of the variant."""
    return lambda variant: replace(variant, model=change(variant.model, **settings))


AS_IS = VariantPlan("as_is", as_it_is, fp8=True)
BF16 = VariantPlan("bf16", in_form("bf16", Facts()), fp8=False)
PRESCRIBED = VariantPlan(
    "prescribed", on_model(compile_blocks, lists=["blocks"]), ("compile-blocks",), fp8=True
)


def run(
    of: Job, *arms: VariantPlan, lists: tuple[str, ...] = ("blocks",), budget_s: float = 600.0
) -> dict[str, Arm]:
    return {arm.name: arm for arm in trial(of, *arms, lists=lists, budget_s=budget_s).arms}


def trial(
    of: Job, *arms: VariantPlan, lists: tuple[str, ...] = ("blocks",), budget_s: float = 600.0
) -> Trial:
    return conduct(of, lists, arms, TrialRun(CPU, Budget(budget_s)))
