"""MOD007's lost hooks on models that are converted under watch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torchao.float8 import convert_to_float8_training

from fp8doctor.analysis.conversion import convert_all_that_fit
from fp8doctor.analysis.layers import would_be_converted
from fp8doctor.analysis.treatment_table import after
from fp8doctor.code_snippets import with_imports
from fp8doctor.examine.fp8_conversion import ConversionWatch
from fp8doctor.facts import Facts
from tests.checks.rules import found_by, outcome_of

LOST = "hooks-or-subclass-lost"


class Scaled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def convert(model: Any) -> None:
    convert_to_float8_training(model, module_filter_fn=lambda module, name: type(module) is nn.Linear)


def hook(model: Any) -> None:
    model[0].register_forward_hook(lambda module, arguments, output: output)


def wrap(model: Any) -> None:
    model[0] = torch.compile(model[0])


ORDERS = {
    "hooks": ((hook, convert), (convert, hook), "convert-first"),
    "wrapper": ((wrap, convert), (convert, wrap), "convert-first"),
    "forward": ((convert_to_float8_training,), (convert,), "keep-in-bf16"),
}
"""What a conversion drops -> steps that lose it, steps in the right order, and the fix."""


@pytest.mark.parametrize("lost", ORDERS)
def test_what_the_conversion_drops(look: Callable[..., Facts], lost: str) -> None:
    def after(*steps: Callable[[Any], Any]) -> Facts:
        with ConversionWatch() as watch:
            model = nn.Sequential(nn.Linear(32, 32), Scaled(32, 32), nn.Linear(32, 32))
            for step in steps:
                step(model)
        return look(model, watched=watch)

    wrong, right, treatment = ORDERS[lost]
    finding = found_by(LOST, after(*wrong))
    assert finding.severity == ("error" if lost == "wrapper" else "warning")
    assert lost in finding.title
    assert finding.treatment.name == treatment
    assert outcome_of(LOST, after(*right)) == "silent"


class Decoder(nn.Module):
    """Widths that FP8 pays for, half of them in a class with a forward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(4096, 4096), Scaled(4096, 4096)) for _ in range(2)
        )


def test_the_fix_for_a_lost_forward_ends_the_finding(look: Callable[..., Facts]) -> None:
    """What stays in BF16 for its forward is no layer that another line would convert."""
    with ConversionWatch() as watch:
        model = convert_to_float8_training(Decoder().bfloat16())
    facts = look(model, watched=watch)
    treatment = found_by(LOST, facts).treatment
    lost = {"layers.0.1", "layers.1.1"}
    assert {each.name for each in after(facts, [treatment]).linears() if each.use == "none"} == lost

    model = Decoder().bfloat16()
    with ConversionWatch() as watch:
        exec(treatment.code, {"model": model})
    facts = look(model, watched=watch)
    assert outcome_of(LOST, facts) == "silent"
    assert {each.name for each in facts.linears() if each.use == "none"} == lost
    kept = found_by("partial-conversion", facts)
    assert kept.severity == "info", "half of its work is in the class that keeps its forward"
    assert kept.evidence["missing_layers"] == 2


@pytest.mark.parametrize(("own", "severity"), [(1, "info"), (4, "warning")])
def test_work_in_a_class_with_its_own_forward_is_no_work_in_fp8(
    own: int, severity: str, look: Callable[..., Facts]
) -> None:
    with torch.device("meta"):
        plain = nn.Linear(4096, 4096)
        model = nn.Sequential(plain, *(Scaled(4096, 4096) for _ in range(own))).bfloat16()
        convert_to_float8_training(model, module_filter_fn=lambda module, name: module is plain)
    finding = found_by("partial-conversion", look(model))
    assert (finding.severity, finding.evidence["missing_layers"]) == (severity, own)


def test_no_line_converts_a_class_with_its_own_forward(look: Callable[..., Facts]) -> None:
    facts = look(Decoder().bfloat16())
    assert [each.name for each in facts.linears() if would_be_converted(each)] == ["layers.0.0", "layers.1.0"]
    model = Decoder().bfloat16()
    exec(with_imports(convert_all_that_fit(facts)), {"model": model})
    assert [type(each) is Scaled for each in model.layers[0]] == [False, True]
