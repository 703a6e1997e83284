"""GPU002 on real torchao models; the GPUs are a stand-in NVML's, and the tries run on the CPU."""

from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import nn
from torchao.float8 import convert_to_float8_training

from fp8doctor import inspect_model
from fp8doctor.analysis.treatment_table import traits
from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.examine import examine_surroundings
from fp8doctor.facts import Facts, Gpu, Target
from tests.checks.environment.test_incompatible_versions import with_releases
from tests.checks.models import float8, mlp, mxfp8, ran_in_te
from tests.checks.rules import Look, fix_of, found_by, outcome_of
from tests.stand_ins.nvml import Device, StandIn, a100, gpu, h100

CORES, RECIPE = "no-fp8-tensor-cores", "recipe-unsupported"


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "ACCELERATE_MIXED_PRECISION"):
        monkeypatch.delenv(name, raising=False)


def machine(monkeypatch: pytest.MonkeyPatch, *devices: Device | tuple[int, int], cuda: str = "13.0") -> Facts:
    """A machine with these GPUs, or one of this capability, and a torch built for this CUDA."""
    made = [gpu("NVIDIA X", "GPU-1", each, 24) if isinstance(each, tuple) else each for each in devices]
    StandIn(*made).install(monkeypatch)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    return examine_surroundings(Target(kind="environment", name="environment"))


@pytest.mark.parametrize(
    ("device", "precision"), [(a100(), "bf16"), (gpu("Tesla V100", "GPU-1", (7, 0), 32), "fp16")]
)
def test_a_gpu_without_tensor_cores_that_was_asked_for_fp8(
    monkeypatch: pytest.MonkeyPatch, device: Device, precision: str
) -> None:
    """They begin with 8.9."""
    for capability, outcome in (((8, 7), "fires"), ((8, 9), "silent")):
        assert outcome_of(CORES, machine(monkeypatch, capability)) == outcome
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    finding = found_by(CORES, machine(monkeypatch, device))
    assert (finding.severity, finding.treatment.name) == ("error", f"{precision}-on-this-gpu")
    assert finding.evidence["fp8_wanted_by"] == "ACCELERATE_MIXED_PRECISION=fp8"
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    finding = found_by(CORES, machine(monkeypatch, device))
    assert (finding.severity, finding.treatment) == ("info", None)


def test_only_visible_gpus_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    for visible, outcome in (("1", "silent"), ("0,1", "fires"), ("", "not_applicable")):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert outcome_of(CORES, machine(monkeypatch, a100(), h100())) == outcome


@pytest.mark.slow
def test_on_such_a_gpu_it_is_told_alone() -> None:
    """How FP8 would have to be compiled, or shaped, is no advice where it cannot run."""
    model = convert_to_float8_training(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)))
    report = inspect_model(model, torch.ones(16, 32), trial=False, assume_gpu="A100")
    areas = ("device", "compilation", "shapes")
    assert {each.code for each in report.findings if each.area in areas} == {"GPU002"}
    assert "accelerate" not in report.prescription[0].treatment.code.lower()  # nor does the script


@pytest.mark.parametrize(
    ("capability", "cuda", "outcome"),
    [
        ((9, 0), "13.0", "fires"),
        ((10, 0), "13.0", "silent"),
        ((12, 0), "13.0", "fires"),
        ((10, 0), "12.6", "fires"),
    ],
)
def test_mxfp8_needs_blackwell_and_its_cuda(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], cuda: str, outcome: str, look: Look
) -> None:
    machine(monkeypatch, capability, cuda=cuda)
    assert outcome_of(RECIPE, look(mxfp8(mlp()))) == outcome
    assert outcome_of(RECIPE, look(mxfp8(mlp(), emulated=True))) == "not_applicable"
    if outcome == "fires":
        assert traits(fix_of(RECIPE, look(mxfp8(mlp()))).name).recipe == "tensorwise"
        plan = diagnose(replace(look(mxfp8(mlp()), tokens=256), assumed_gpu="H100")).prescription
        assert [step.treatment.name for step in plan] == ["stay-in-bf16"], "too small for FP8 at all"
        model = mlp()
        exec(fix_of(RECIPE, look(mxfp8(mlp()))).code, {"model": model})
        assert outcome_of(RECIPE, look(model)) == "silent"


@pytest.mark.parametrize(
    ("gpu_name", "release", "recipe", "outcome"),
    [
        ("L4", "2.6.0+cu124", "rowwise", "fires"),
        ("L4", "2.7.0", "rowwise", "silent"),
        ("L4", "2.6.0", "tensorwise", "silent"),
        ("H100", "2.6.0", "rowwise", "silent"),
    ],
)
def test_rowwise_needs_a_newer_torch_on_ada(
    monkeypatch: pytest.MonkeyPatch, gpu_name: str, release: str, recipe: str, outcome: str, look: Look
) -> None:
    machine(monkeypatch)
    facts = with_releases(look(float8(mlp(), recipe=recipe)), release)
    assert outcome_of(RECIPE, replace(facts, assumed_gpu=gpu_name)) == outcome


def test_a_gpu_that_is_assumed_counts_without_another(monkeypatch: pytest.MonkeyPatch, look: Look) -> None:
    machine(monkeypatch)
    facts = look(mxfp8(mlp()))
    assert outcome_of(RECIPE, facts) == outcome_of(CORES, facts) == "not_applicable"
    assert outcome_of(RECIPE, replace(facts, assumed_gpu="RTX5090")) == "fires"
    assert outcome_of(RECIPE, replace(facts, assumed_gpu="B200")) == "silent"
    assert outcome_of(CORES, replace(facts, assumed_gpu="A100")) == "fires"


@pytest.mark.parametrize(
    ("recipe", "capability", "outcome"),
    [
        ("MXFP8BlockScaling", (9, 0), "fires"),
        ("DelayedScaling", (8, 9), "silent"),
        ("Float8BlockScaling", (9, 0), "silent"),
        ("Float8BlockScaling", (10, 0), "fires"),
        ("NVFP4BlockScaling", (9, 0), "fires"),
        ("NVFP4BlockScaling", (12, 0), "silent"),
    ],
)
def test_transformer_engine(
    recipe: str, capability: Any, outcome: str, look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(monkeypatch, capability)
    facts = with_releases(look(ran_in_te(monkeypatch, recipe)), transformer_engine="2.8.0")
    assert outcome_of(RECIPE, facts) == outcome
    amd = Gpu(name="AMD", vendor="amd", compute_capability=None, architecture="gfx942", visible=True)
    assert outcome_of(RECIPE, replace(facts, gpus=(amd,))) == "silent", "which recipes run is not judged"
