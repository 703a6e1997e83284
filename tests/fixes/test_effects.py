"""Every fix that is printed for a script does what it says, however the model is wrapped."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest

from tests.checks.environment.live import printed
from tests.fixes.effect import defects
from tests.fixes.scripts import SCRIPTS

CASES = [(name, how) for name, script in SCRIPTS.items() for how in script.wrappings]
IN_THE_GATE = (
    "eager-peft",
    "fp32 weights-compiled",
    "adapters converted-ddp",
    "accelerate-plain",
)
"""One of each way to wrap a model, and Accelerate. All take 600 s of CPU."""

PROGRAM = """
import sys
import accelerate
import peft
import torch._dynamo
import torch._inductor.compile_fx
import torchao.float8
import transformers.modeling_utils
from tests.fixes.effect import answered
print(answered(sys.argv[1]))
"""
"""Runs in a fork of a process that did its imports and nothing else."""


def answer(*order: Any) -> dict[str, Any]:
    """Return what `tests.fixes.effect` answers in a fresh process."""
    said: dict[str, Any] = json.loads(printed(PROGRAM, json.dumps(order)).splitlines()[-1])
    return said


@functools.cache
def printed_for(name: str, how: str) -> dict[str, Any]:
    """Return what is found and printed for a script, once."""
    return answer(name, how)


def applied(name: str, how: str, fix: dict[str, Any], frozen: list[str]) -> list[str]:
    """Return what a fix does wrong when its lines are applied as printed."""
    treatment = {"name": fix["name"], "summary": "s", "code": fix["code"], "kind": fix["kind"]}
    codes = [code for code in fix["for"] if code in SCRIPTS[name].codes]
    return defects(answer(name, how, treatment), codes, frozen)


@pytest.mark.slow
@pytest.mark.gate(*IN_THE_GATE)
@pytest.mark.parametrize(("name", "how"), CASES)
def test_a_printed_fix_does_what_it_says(name: str, how: str) -> None:
    said, about = printed_for(name, how), {*SCRIPTS[name].codes}
    assert "raised" not in said, said["raised"]
    assert about <= {*said["codes"]}, "the script no longer triggers what it is about"
    fixes = [fix for fix in said["fixes"] if about & {*fix["for"]}]
    assert fixes
    for fix in fixes:
        assert fix["kind"] != "sketch", "a sketch cannot be applied"
        assert applied(name, how, fix, said["frozen"]) == [], fix["code"]


PLANTED = {
    "changes nothing": (
        "from torchao.float8 import convert_to_float8_training\nmodel = model",
        "is still found",
    ),
    "raises": ("model.no_such_method()", "AttributeError"),
    "unfreezes": (
        "for parameter in model.parameters():\n    parameter.requires_grad_(True)\n"
        "for layer in model.base_model.model.model.layers:\n    layer.compile()",
        "frozen parameters",
    ),
    "stops learning": (
        "for layer in model.base_model.model.model.layers:\n    layer.compile()\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.0)",
        "the loss does not fall",
    ),
}
"""Bad fixes that import cleanly: what is wrong with them -> their lines, and what the harness has to say."""


@pytest.mark.slow
@pytest.mark.gate("changes nothing")
@pytest.mark.parametrize(("lines", "said"), PLANTED.values(), ids=PLANTED)
def test_a_planted_bad_fix_is_caught(lines: str, said: str) -> None:
    fix = {"name": "planted", "code": lines, "kind": "python", "for": ["CMP001"]}
    (defect, *_) = applied("eager", "peft", fix, printed_for("eager", "peft")["frozen"])
    assert said in defect
