"""MOD011 on model files whose own conversion runs while they are loaded, and the promise that watching
changes nothing."""

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

from fp8doctor.checks.engagement.hooks_or_subclass_lost import hooks_or_subclass_lost
from fp8doctor.errors import UserError
from fp8doctor.examine import examine
from fp8doctor.examine.fp8_conversion import ConversionWatch
from fp8doctor.facts import Facts
from fp8doctor.finding import Finding, NotApplicable
from fp8doctor.loading.model_file import load

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


@pytest.fixture
def facts_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Facts]:
    """Facts of the model file that ends with these lines, loaded as the worker loads it."""
    monkeypatch.setattr("sys.path", [*sys.path])
    monkeypatch.setattr("sys.argv", ["pytest"])

    def loaded(lines: str) -> Facts:
        path = tmp_path / "watched_model.py"
        path.write_text(
            textwrap.dedent(MODEL) + textwrap.indent(textwrap.dedent(lines).strip(), "    ") + "\n", "utf-8"
        )
        try:
            return examine(load(str(path)))
        finally:
            sys.modules.pop("watched_model", None)

    return loaded


FIRES = {
    "hooks": (
        "model[0].register_forward_hook(hook); return convert(model, module_filter_fn=plain)",
        "the hooks of 1 Linear",
        "convert-first",
    ),
    "compile": (
        "import torch; model[2].forward = torch.compile(model[2].forward); return convert(model, "
        "module_filter_fn=plain)",
        "the compile of 1 Linear",
        "convert-first",
    ),
    "own forward": ("return convert(model)", "the own forward of 1 Linear", "keep-subclasses"),
}
SILENT = {
    "hooks": "convert(model, module_filter_fn=plain); model[0].register_forward_hook(hook); return model",
    "compile": "convert(model, module_filter_fn=plain); model[2].compile(); return model",
    "compile above": "model[2].compile(); convert(model, module_filter_fn=plain); model.compile(); "
    "return model",
    "own forward": "return convert(model, module_filter_fn=plain)",
}
IN_PLACE = "model[2].compile(); return convert(model, module_filter_fn=plain)"
"""Compiles nothing before torch 2.15, which is when the method asked for here came."""
if hasattr(torch._dynamo.eval_frame.OptimizedModule, "_should_wrap_module_call_impl"):
    FIRES["compile in place"] = (IN_PLACE, "the compile of 1 Linear", "convert-first")
else:
    SILENT["compile of nothing"] = IN_PLACE


@pytest.mark.parametrize("lost", FIRES)
def test_what_the_conversion_drops(facts_of: Callable[[str], Facts], lost: str) -> None:
    lines, title, treatment = FIRES[lost]
    finding = hooks_or_subclass_lost(facts_of(lines))
    assert isinstance(finding, Finding)
    assert finding.title == f"the conversion dropped {title}"
    assert finding.treatment is not None
    assert finding.treatment.name == treatment


@pytest.mark.parametrize("order", SILENT)
def test_the_right_order_is_silent(facts_of: Callable[[str], Facts], order: str) -> None:
    facts = facts_of(SILENT[order])
    assert facts.training.conversion is not None
    assert facts.training.conversion.linears == 2
    assert hooks_or_subclass_lost(facts) is None


def test_a_compiled_wrapper_goes_on_calling_the_old_linear(facts_of: Callable[[str], Facts]) -> None:
    finding = hooks_or_subclass_lost(
        facts_of(
            "import torch; model[0] = torch.compile(model[0]); return convert(model, module_filter_fn=plain)"
        )
    )
    assert isinstance(finding, Finding)
    assert finding.severity == "error"
    assert finding.title == "1 FP8 layer inside a compiled wrapper never called"
    healthy = facts_of(
        "import torch; convert(model, module_filter_fn=plain); model[0] = torch.compile(model[0]); "
        "return model"
    )
    assert hooks_or_subclass_lost(healthy) is None


@pytest.mark.parametrize("convert_first", [False, True])
def test_so_torch_does(convert_first: bool) -> None:
    """The same, seen by running it."""
    model, called = nn.Sequential(nn.Linear(32, 32)), []
    if convert_first:
        convert_to_float8_training(model)
    model[0] = torch.compile(model[0], backend="eager")
    if not convert_first:
        convert_to_float8_training(model)
    model[0]._orig_mod.register_forward_pre_hook(lambda *arguments: called.append(1))
    model(torch.ones(16, 32))
    assert bool(called) is convert_first


def test_accelerate_is_watched_as_well(facts_of: Callable[[str], Facts], forget_accelerate: None) -> None:
    facts = facts_of("""
        from accelerate import Accelerator
        model.append(nn.Linear(32, 32))
        return Accelerator(mixed_precision="fp8", cpu=True).prepare(model)
    """)
    finding = hooks_or_subclass_lost(facts)
    assert isinstance(finding, Finding)
    assert finding.evidence["classes"] == ("watched_model.Scaled",)
    assert (finding.evidence["converted"], finding.evidence["first"]) == (2, "1")


def test_no_conversion_and_no_watch(facts_of: Callable[[str], Facts], look: Callable[..., Facts]) -> None:
    for facts, reason in (
        (facts_of("return model"), "no Linear was replaced"),
        (look(convert_to_float8_training(nn.Sequential(nn.Linear(32, 32)))), "only while it loads"),
    ):
        answer = hooks_or_subclass_lost(facts)
        assert isinstance(answer, NotApplicable)
        assert reason in answer.reason


def test_a_layer_that_is_gone_again_counts_for_nothing(look: Callable[..., Facts]) -> None:
    with ConversionWatch() as watch:
        model = nn.Sequential(nn.Linear(32, 32))
        model[0].register_forward_hook(lambda *arguments: None)
        convert_to_float8_training(model)
        model[0] = nn.Linear(32, 32)
    facts = look(model, watched=watch)
    assert facts.training.conversion is not None
    assert facts.training.conversion.linears == 0


def test_frozen_layers_that_became_trainable_are_noted(look: Callable[..., Facts]) -> None:
    with ConversionWatch() as watch:
        model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)).requires_grad_(False)
        convert_to_float8_training(model)
        model[1].requires_grad_(True)
    facts = look(model, watched=watch)
    assert facts.training.conversion is not None
    assert facts.training.conversion.unfrozen == ("1",)


def test_watching_leaves_no_trace(facts_of: Callable[[str], Facts]) -> None:
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
