"""Every fix that is printed for a script does what it says, however the model is wrapped."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest

from research.fixes.effect import defects, place_of
from research.fixes.scripts import SCRIPTS
from tests.programs import printed

CASES = [
    pytest.param(name, how, first, id=f"{name}, {how}{', wrapped first' if first else ''}")
    for name, script in SCRIPTS.items()
    for how in script.wrappings
    for first in (False, True)
    if how != "plain" or not first
]
PROGRAM = """
import sys
import accelerate
import peft
import torch._dynamo
import torch._inductor.compile_fx
import torchao.float8
import transformers.modeling_utils
from research.fixes.effect import answered
print(answered(sys.argv[1]))
"""
"""Runs in a fork of a process that did its imports and nothing else."""


def answer(*order: Any) -> dict[str, Any]:
    """Return what `research.fixes.effect` answers in a fresh process."""
    said: dict[str, Any] = json.loads(printed(PROGRAM, json.dumps(order)).splitlines()[-1])
    return said


@functools.cache
def printed_for(name: str, how: str, first: bool = False) -> dict[str, Any]:
    """Return what is found and printed for a script, once."""
    said = answer(name, how, first)
    assert "raised" not in said, said["raised"]
    return said


def applied(name: str, how: str, first: bool, fix: dict[str, Any], printed_first: bool) -> list[str]:
    """Return what a fix does wrong when its lines are applied as printed, to a script wrapped in this order.

    They were printed for the script in the one order or the other.
    """
    treatment = {"name": fix["name"], "summary": "s", "code": fix["code"], "kind": fix["kind"]}
    codes = {*fix["for"]} & {*SCRIPTS[name].codes}
    before = (printed_for(name, how, each) for each in (first, printed_first))
    return defects(answer(name, how, first, treatment), codes, *before)


@pytest.mark.parametrize(("name", "how", "first"), CASES)
def test_a_printed_fix_does_what_it_says(name: str, how: str, first: bool) -> None:
    said, about = printed_for(name, how, first), {*SCRIPTS[name].codes}
    assert about <= {*said["codes"]}, "the script no longer triggers what it is about"
    fixes = [fix for fix in said["fixes"] if about & {*fix["for"]}]
    assert fixes
    for fix in fixes:
        assert fix["kind"] != "sketch", "a sketch cannot be applied"
        converts = fix["kind"] == "python" and place_of(fix["code"]) == "convert" and how != "plain"
        for order in {first, not first} if converts else {first}:
            assert applied(name, how, order, fix, first) == [], fix["code"]


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
    "brings a new warning": (
        "from torchao.float8 import Float8LinearConfig, convert_to_float8_training\n"
        "convert_to_float8_training(model, config=Float8LinearConfig(emulate=True))\n"
        "for layer in model.model.layers:\n    layer.compile()",
        "emulated-fp8 is new",
    ),
    "leaves weights as they are": (
        "for layer in model.base_model.model.model.layers:\n    layer.compile()\n"
        "trained = [each for name, each in model.named_parameters() if 'lora_A' in name]\n"
        "optimizer = torch.optim.AdamW(trained, lr=1e-2)",
        "parameters-without-optimizer is new",
    ),
    "stops learning": (
        "for layer in model.base_model.model.model.layers:\n    layer.compile()\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.0)",
        "the loss does not fall",
    ),
}
"""Bad fixes that import cleanly: what is wrong with them -> their lines, and what the harness has to say."""


@pytest.mark.parametrize(("lines", "said"), PLANTED.values(), ids=PLANTED)
def test_a_planted_bad_fix_is_caught(lines: str, said: str) -> None:
    fix = {"name": "planted", "code": lines, "kind": "python", "for": ["CMP001"]}
    assert any(said in each for each in applied("eager", "peft", False, fix, False))
