"""Every fix that is printed for a script does what it says, however the model is wrapped."""

from __future__ import annotations

import functools
from typing import Any

import accelerate as accelerate
import peft as peft
import pytest

from fp8doctor.finding import Treatment
from tests.fixes.effect import defects, effect, forked, printed
from tests.fixes.scripts import NO_EFFECT_HERE, SCRIPTS, WRAPPINGS, Script, wrapped

CASES = [
    pytest.param(script, id=f"{name}, {how}")
    for name, each in SCRIPTS.items()
    for how in WRAPPINGS
    if (script := wrapped(each, how)) is not None
]


@functools.cache
def printed_for(script: Script) -> dict[str, Any]:
    """Return what is found and printed for a script, once."""
    return forked(printed, script)


def applied(script: Script, fix: dict[str, Any], frozen: list[str]) -> list[str]:
    """Return what a fix does wrong when its lines are applied as printed."""
    treatment = Treatment(name=fix["name"], summary="s", code=fix["code"], kind=fix["kind"])
    codes = [code for code in fix["for"] if code in script.codes]
    return defects(forked(effect, script, treatment), codes, frozen)


@pytest.mark.slow
@pytest.mark.parametrize("script", CASES)
def test_a_printed_fix_does_what_it_says(script: Script) -> None:
    said = printed_for(script)
    assert "raised" not in said, said["raised"]
    assert set(script.codes) <= set(said["codes"]), "the script no longer triggers what it is about"
    ran = 0
    for fix in said["fixes"]:
        if not set(fix["for"]) & set(script.codes) or fix["name"] in NO_EFFECT_HERE:
            continue
        assert applied(script, fix, said["frozen"]) == [], fix["code"]
        ran += 1
    assert ran or script.codes == ()


@pytest.mark.slow
def test_no_printed_fix_escapes() -> None:
    """What is printed for these scripts is applied, or listed with the reason."""
    kinds = {
        fix["name"]: fix["kind"]
        for script in SCRIPTS.values()
        for fix in printed_for(script)["fixes"]
        if set(fix["for"]) & set(script.codes)
    }
    sketches = {name for name, kind in kinds.items() if kind == "sketch"}
    assert sketches <= set(NO_EFFECT_HERE)


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
@pytest.mark.parametrize(("lines", "said"), PLANTED.values(), ids=PLANTED)
def test_a_planted_bad_fix_is_caught(lines: str, said: str) -> None:
    script = wrapped(SCRIPTS["eager"], "peft")
    assert script is not None
    fix = {"name": "planted", "code": lines, "kind": "python", "for": ["CMP001"]}
    (defect, *_) = applied(script, fix, printed_for(script)["frozen"])
    assert said in defect
