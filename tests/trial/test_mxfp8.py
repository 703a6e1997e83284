"""torchao's MXFP8 for dense layers: tried on Blackwell, never on a layer with a bias, and modelled."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace
from torch import nn

from fp8doctor.analysis.treatment_table import variant
from fp8doctor.cost import gpu_spec
from fp8doctor.cost.step_cost import in_bf16, modelled_step, with_linears_compiled, with_recipe
from fp8doctor.diagnosis.document import read_saved
from fp8doctor.facts import Facts, Gpu, Linear, Network, Software, Target, Workload
from fp8doctor.loading.job import Job
from fp8doctor.stacks.torchao import unwrapped
from fp8doctor.trial.explorations import TrialContext, other_recipe
from tests.trial.treated import applied, float8, in_fp8

NAME = "recipe-mxfp8"
LLAMA_8B = Path(__file__).parents[1] / "patients" / "recorded" / "h200-llama_8b_float8.json.gz"


class Mixed(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(64, 64, bias=False), nn.Linear(64, 64), nn.Linear(64, 48, bias=False))


def test_only_layers_without_a_bias_whose_sides_fit_are_converted() -> None:
    model = float8(Mixed().bfloat16())
    changed = applied(NAME, model).model
    assert in_fp8(changed) == {"0": "mxfp8", "1": "tensorwise", "2": "tensorwise"}
    assert in_fp8(model) == dict.fromkeys("012", "tensorwise")
    assert unwrapped(changed[0].weight).data_ptr() == model[0].weight.data_ptr()  # type: ignore[index]
    assert variant(NAME, fp8=True) == "MXFP8 block scaling"


def context(compute_capability: str, bias: bool = False) -> TrialContext:
    layer = Linear(
        name="up",
        stack="torchao",
        kind="torchao.float8.float8_linear.Float8Linear",
        use="training",
        recipe="tensorwise",
        compiled="",
        bias=bias,
    )
    gpu = Gpu(name="GPU", vendor="nvidia", compute_capability=compute_capability, visible=True)
    known = Facts(
        gpus=(gpu,), software=Software(cuda="13.0"), network=Network(linears=(layer,)), recipe_tries={}
    )
    return TrialContext(known, Job(model=None, target=Target(), workload=Workload()), ())


@pytest.mark.parametrize(
    ("capability", "bias", "tried"),
    [("10.0", False, True), ("10.0", True, False), ("9.0", False, False), ("12.0", False, False)],
)
def test_it_is_tried_on_data_center_blackwell_only(capability: str, bias: bool, tried: bool) -> None:
    of = context(capability, bias)
    assert other_recipe(of, NAME) is tried
    assert other_recipe(of, "recipe-rowwise") is True


def test_a_step_of_it_is_modelled_where_it_runs() -> None:
    """torchao 0.13: 10,417 tokens a second with tensorwise, 9,642 with MXFP8, on eight B200."""
    of = read_saved(LLAMA_8B)[0]
    of = replace(
        of,
        workload=replace(of.workload, tokens=8192, sequence_length=8192, rows={}),
        trial=replace(of.trial, rows={}),
    )
    compiled, b200 = with_linears_compiled(of, yes=True), gpu_spec("B200")
    plain, tensorwise, mxfp8 = (
        modelled_step(each, b200) for each in (in_bf16(compiled), compiled, with_recipe(compiled, "mxfp8"))
    )
    assert plain is not None
    assert tensorwise is not None
    assert mxfp8 is not None
    assert mxfp8.step_ms / tensorwise.step_ms == pytest.approx(10417 / 9642, rel=0.01)
    assert tensorwise.step_ms < mxfp8.step_ms < plain.step_ms
    assert modelled_step(with_recipe(compiled, "mxfp8"), gpu_spec("H100")) is None
    assert modelled_step(with_recipe(with_linears_compiled(of, yes=False), "mxfp8"), b200) is None
