"""MOD007's lost hooks on model files that convert while they are loaded; watching changes nothing."""

from __future__ import annotations

import gc
import sys
import textwrap
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torchao.float8 import convert_to_float8_training

from fp8doctor.errors import UserError
from fp8doctor.examine import examine
from fp8doctor.examine.fp8_conversion import ConversionWatch
from fp8doctor.facts import Facts
from fp8doctor.loading.model_file import load
from tests.checks.rules import found_by, outcome_of

MODEL = """
    from torch import nn
    from torchao.float8 import convert_to_float8_training as convert


    class Scaled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)


    def plain(module, name):
        return type(module) is nn.Linear


    def hook(module, arguments, output):
        return output


    def build_model():
        model = nn.Sequential(nn.Linear(32, 32), Scaled(32, 32), nn.Linear(32, 32))
"""
"""The beginning of a model file; what follows is the order of steps."""


Read = Callable[[str], Facts]


@pytest.fixture
def facts_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Read:
    """Facts of the model file that ends with these lines, loaded as the worker loads it."""
    monkeypatch.setattr("sys.path", [*sys.path])
    monkeypatch.setattr("sys.argv", ["pytest"])

    def loaded(lines: str) -> Facts:
        path = tmp_path / "watched_model.py"
        path.write_text(f"{textwrap.dedent(MODEL)}    {lines}\n", "utf-8")
        try:
            return examine(load(str(path)))
        finally:
            sys.modules.pop("watched_model", None)

    return loaded


LOST = "hooks-or-subclass-lost"
PLAIN = "convert(model, module_filter_fn=plain)"

ORDERS = {
    "hooks": (
        f"model[0].register_forward_hook(hook); return {PLAIN}",
        f"{PLAIN}; model[0].register_forward_hook(hook); return model",
        "convert-first",
    ),
    "compile": (
        f"import torch; model[2].forward = torch.compile(model[2].forward); return {PLAIN}",
        f"{PLAIN}; model[2].compile(); return model",
        "convert-first",
    ),
    "wrapper": (
        f"import torch; model[0] = torch.compile(model[0]); return {PLAIN}",
        f"import torch; {PLAIN}; model[0] = torch.compile(model[0]); return model",
        "convert-first",
    ),
    "forward": ("return convert(model)", f"return {PLAIN}", "keep-subclasses"),
}
"""What a conversion drops -> lines that lose it, lines in the right order, and the fix."""


@pytest.mark.parametrize("lost", ORDERS)
def test_what_the_conversion_drops(facts_of: Read, lost: str) -> None:
    wrong, right, treatment = ORDERS[lost]
    finding = found_by(LOST, facts_of(wrong))
    assert finding.severity == ("error" if lost == "wrapper" else "warning")
    assert lost in finding.title
    assert finding.treatment.name == treatment
    assert outcome_of(LOST, facts_of(right)) == "silent"


def test_watching_leaves_no_trace(facts_of: Read) -> None:
    before = dict(torch_module._global_module_registration_hooks)
    facts_of("return convert(model)")
    with pytest.raises(UserError):
        facts_of("raise RuntimeError('no')")
    assert dict(torch_module._global_module_registration_hooks) == before


def test_watching_keeps_nothing_alive() -> None:
    with ConversionWatch() as watch:
        model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
        old, weight = weakref.ref(model[1]), weakref.ref(model[1].weight)
        convert_to_float8_training(model)
        assert len(watch.replacements) == 2
        del model
        gc.collect()
        assert old() is None
        assert weight() is None


def test_a_class_that_cannot_be_read_costs_the_fact_and_not_the_conversion(
    look: Callable[..., Facts], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*replaced: nn.Module) -> None:
        raise RuntimeError("a property of the user's")

    monkeypatch.setattr("fp8doctor.examine.fp8_conversion.replacement", broken)
    with ConversionWatch() as watch:
        model = convert_to_float8_training(nn.Sequential(nn.Linear(32, 32)))
    assert type(model[0]).__name__ == "Float8Linear"
    facts = look(model, watched=watch)
    assert "a property of the user's" in facts.gaps["training.conversion"]
    assert torch.is_tensor(model(torch.ones(16, 32)))
