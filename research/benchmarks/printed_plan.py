"""Apply the plan that a saved report prints, line by line as a user would, to the model of a job. Imports no
fp8doctor: `plain_step.py` times the result."""

from __future__ import annotations

import ast
import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

PLAN = "plan"
"""Name of the change, whose argument is the path of the report."""

LEAVES_OUT_FP8 = ("# leave out the conversion to FP8", "# leave FP8 out")
LEAVES_OUT_COMPILE = "# leave out your own torch.compile"
KEEPS_COMPILE = "# leave your own torch.compile as it is"
SAYS = (*LEAVES_OUT_FP8, LEAVES_OUT_COMPILE, KEEPS_COMPILE)
"""First words of comments that tell a user what to do."""

CONVERTS = ("convert_to_float8_training(", "quantize_(")
"""Calls that stand in the place of the job's own conversion."""

NOT_THE_MODELS = frozenset({"optimizer", "batch", "tokenizer", "accelerator"})
"""Names of a script whose lines a built model does not run."""

KEEP, AUTOCAST = "keep-in-bf16", "autocast-bf16"


class Applied:
    """A model and which steps of a plan made it."""

    def __init__(self, job: Any, model: nn.Module) -> None:
        self.job, self.model = job, model
        self.executed: list[str] = []
        self.by_hand: list[str] = []
        self.skipped: list[str] = []
        self.conversions: list[str] = []

    def step(self, treatment: Mapping[str, Any]) -> None:
        """Apply one step, or note why it is not applied."""
        name, code = treatment["name"], treatment["code"]
        said = [line for line in code.splitlines() if line.startswith(SAYS)]
        lines = parsed(code)
        if treatment["kind"] == "shell":
            self.skipped.append(f"{name} (shell)")
        elif lines is not None and (said or treatment["kind"] == "python") and not self.outside(lines):
            self.follow(said)
            if any(each in code for each in CONVERTS):
                self.without_fp8()
                self.conversions.append(name)
            self.execute(code)
            self.executed.append(name)
        elif name == AUTOCAST:
            self.job.autocast = torch.bfloat16
            self.by_hand.append(name)
        elif name in self.job.VARIANTS:
            layers = [treatment["layers"]] if name == KEEP else []
            self.model = self.job.VARIANTS[name](self.model, *layers)
            self.by_hand.append(name)
        else:
            self.skipped.append(f"{name} ({treatment['kind']})")

    @staticmethod
    def outside(lines: ast.Module) -> bool:
        """Whether the lines are about more of the script than its model."""
        names = {node.id for node in ast.walk(lines) if isinstance(node, ast.Name)}
        return not names.isdisjoint(NOT_THE_MODELS)

    def follow(self, said: Sequence[str]) -> None:
        """Do what the comments say. BF16 is without the job's own compilation, unless they keep it."""
        if any(line.startswith(LEAVES_OUT_FP8) for line in said):
            kept = any(line.startswith(KEEPS_COMPILE) for line in said)
            self.model = self.variant(*(("bf16_as_compiled", KEEP) if kept else ("bf16",)))(self.model)
        elif any(line.startswith(LEAVES_OUT_COMPILE) for line in said):
            self.model = importlib.import_module("plain").uncompiled(self.model)

    def variant(self, *names: str) -> Callable[[nn.Module], nn.Module]:
        """Return the first of these changes that the job knows."""
        found: Callable[[nn.Module], nn.Module] = next(
            self.job.VARIANTS[name] for name in names if name in self.job.VARIANTS
        )
        return found

    def without_fp8(self) -> None:
        """Take the job's conversion back, in place, before other lines convert."""
        importlib.import_module("plain").in_bf16(inner(self.model))

    def execute(self, code: str) -> None:
        """Run the lines on the model that the script has before its ``torch.compile(model)``."""
        script = {"model": inner(self.model), "torch": torch, "nn": nn}
        exec(compile(code, PLAN, "exec"), script)
        if script["model"] is not inner(self.model):
            self.model = script["model"]

    def report(self) -> dict[str, list[str]]:
        """Tell what became of the steps."""
        found = {"executed": self.executed, "by_hand": self.by_hand, "skipped": self.skipped}
        return found | ({"conversions": self.conversions} if len(self.conversions) > 1 else {})


def parsed(code: str) -> ast.Module | None:
    try:
        return ast.parse(code)
    except SyntaxError:
        return None


def inner(model: nn.Module) -> nn.Module:
    """Return what ``torch.compile(model)`` wraps: it compiles when it is called first."""
    found: nn.Module = getattr(model, "_orig_mod", model)
    return found


def apply_plan(job: Any, model: nn.Module, path: str) -> Applied:
    """Apply every step of the report's plan in its order."""
    applied = Applied(job, model)
    for step in json.loads(Path(path).read_text())["prescription"]:
        applied.step(step["treatment"])
    return applied
