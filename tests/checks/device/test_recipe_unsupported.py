"""GPU002 on real torchao models. The GPUs are a stand-in NVML's; the tries run on the CPU, which has
``_scaled_mm``."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import msgspec
import pytest
import torch
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.quantization import quantize_

from fp8doctor.examine import fp8_support
from fp8doctor.facts import Facts, Gpu, Package
from tests import prototypes
from tests.checks.environment.live import finding_of, outcome_of
from tests.stand_ins import transformer_engine as stand_in
from tests.stand_ins.nvml import Device, StandIn, a100, gpu, h100
from tests.stand_ins.scaled_mm import needs_rowwise_scaled_mm, needs_scaled_mm

Look = Callable[..., Facts]
Machine = Callable[..., None]


def b200() -> Device:
    return gpu("NVIDIA B200", "GPU-c1000000-0000-0000-0000-000000000000", (10, 0), 180)


def l40s() -> Device:
    return gpu("NVIDIA L40S", "GPU-d1000000-0000-0000-0000-000000000000", (8, 9), 48)


def rtx5090() -> Device:
    return gpu("NVIDIA GeForce RTX 5090", "GPU-e1000000-0000-0000-0000-000000000000", (12, 0), 32)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A machine with these GPUs and a torch built for this CUDA."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def have(*devices: Device, cuda: str = "13.0") -> None:
        StandIn(*devices).install(monkeypatch)
        monkeypatch.setattr(torch.version, "cuda", cuda)

    return have


def linears() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).bfloat16()


def mxfp8(recipe: str = "MXFP8_RCEIL") -> nn.Module:
    model = linears()
    quantize_(model, prototypes.mxfp8(recipe), filter_fn=lambda module, name: isinstance(module, nn.Linear))
    return model


def float8(recipe: str) -> nn.Module:
    return convert_to_float8_training(linears(), config=Float8LinearConfig.from_recipe_name(recipe))


@pytest.mark.parametrize(
    ("name", "sick"), [("h100", True), ("b200", False), ("rtx5090", True), ("l40s", True)]
)
def test_mxfp8_needs_blackwell(name: str, sick: bool, machine: Machine, look: Look) -> None:
    machine({"h100": h100, "b200": b200, "rtx5090": rtx5090, "l40s": l40s}[name]())
    facts = look(mxfp8())
    finding = finding_of("GPU002", facts)
    assert (finding is not None) == sick
    if finding:
        assert finding.severity == "error"
        assert finding.title.startswith(
            "mxfp8 does not run here: it needs compute capability 10.0 or higher and below 11.0, and NVIDIA"
        )
        assert finding.evidence["layers"] == 2


def test_the_treatment_makes_it_silent(machine: Machine, look: Look) -> None:
    machine(h100())
    finding = finding_of("GPU002", look(mxfp8()))
    assert finding is not None
    assert finding.treatment is not None
    names = {
        "Float8LinearConfig": Float8LinearConfig,
        "convert_to_float8_training": convert_to_float8_training,
        "model": linears(),
    }
    exec(finding.treatment.code, names)
    facts = look(names["model"])
    assert [linear.recipe for linear in facts.network.linears] == ["tensorwise", "tensorwise"]
    assert outcome_of("GPU002", facts).outcome == "healthy"


@pytest.mark.parametrize(
    ("architecture", "recipe", "outcome"),
    [
        ("gfx942:sramecc+:xnack-", "mxfp8", "sick"),
        ("gfx950:sramecc+:xnack-", "mxfp8", "healthy"),
        ("gfx942:sramecc+:xnack-", "tensorwise", "healthy"),
        ("gfx1201", "tensorwise", "healthy"),
        ("gfx90a:sramecc+:xnack-", "tensorwise", "not_applicable"),
    ],
)
def test_amd_by_architecture(architecture: str, recipe: str, outcome: str, look: Look) -> None:
    facts = look(mxfp8() if recipe == "mxfp8" else float8(recipe))
    amd = Gpu(
        name="AMD Instinct",
        vendor="amd",
        compute_capability=None,
        architecture=architecture.partition(":")[0],
        visible=True,
    )
    assert outcome_of("GPU002", msgspec.structs.replace(facts, gpus=())).reason == "no GPU is visible"
    facts = msgspec.structs.replace(facts, gpus=(amd,))
    assert outcome_of("GPU002", facts).outcome == outcome
    if outcome == "sick":
        finding = finding_of("GPU002", facts)
        assert finding is not None
        assert finding.title == "mxfp8 does not run here: it needs gfx950, and AMD Instinct is gfx942"
        assert finding.treatment is not None
        assert 'from_recipe_name("tensorwise")' in finding.treatment.code


def test_amds_transformer_engine_has_no_fp8_on_rdna(monkeypatch: pytest.MonkeyPatch, look: Look) -> None:
    stand_in.install(monkeypatch, "quantization")
    layer = stand_in.Linear(64, 64)
    with stand_in.autocast():
        layer(torch.ones(16, 64))
    facts = look(nn.Sequential(layer))
    for architecture, outcome in (("gfx942", "healthy"), ("gfx1201", "sick")):
        amd = Gpu(name="AMD", vendor="amd", compute_capability=None, architecture=architecture, visible=True)
        assert outcome_of("GPU002", msgspec.structs.replace(facts, gpus=(amd,))).outcome == outcome


def test_cuda_is_too_old(machine: Machine, look: Look) -> None:
    machine(b200(), cuda="12.6")
    finding = finding_of("GPU002", look(mxfp8()))
    assert finding is not None
    assert "it needs CUDA 12.8, and torch was built with 12.6" in finding.title


def test_what_is_emulated_on_purpose_runs_anywhere(machine: Machine, look: Look) -> None:
    machine(h100())
    assert outcome_of("GPU002", look(mxfp8("MXFP8_EMULATED_RCEIL"))).outcome == "not_applicable"


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
@pytest.mark.parametrize("device_of", [h100, b200, l40s, rtx5090])
def test_float8_recipes_are_believed_until_a_try_fails(
    recipe: str, device_of: Callable[[], Device], machine: Machine, look: Look
) -> None:
    machine(device_of())
    assert outcome_of("GPU002", look(float8(recipe))).outcome == "healthy"


@pytest.mark.parametrize(
    "by_row", [pytest.param(False, marks=needs_scaled_mm), pytest.param(True, marks=needs_rowwise_scaled_mm)]
)
def test_the_try_is_a_valid_call(by_row: bool) -> None:
    assert fp8_support.try_scaled_mm(by_row, "cpu") is None


def test_the_error_of_a_try_is_one_line_without_homes() -> None:
    assert (
        fp8_support.try_scaled_mm(True, "meta")
        == "RuntimeError: Tensor.item() cannot be called on meta tensors"
    )


def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA counts as in use, and what is tried there is tried on the CPU."""
    real = fp8_support.try_scaled_mm
    monkeypatch.setattr(fp8_support, "cuda_in_use", lambda: True)
    monkeypatch.setattr(fp8_support, "try_scaled_mm", lambda by_row, where: real(by_row, "cpu"))


@needs_rowwise_scaled_mm
def test_a_try_that_runs_is_healthy(monkeypatch: pytest.MonkeyPatch, machine: Machine, look: Look) -> None:
    machine(rtx5090())
    on_the_cpu(monkeypatch)
    facts = look(float8("rowwise"))
    assert facts.recipe_tries == {"rowwise": None}
    assert outcome_of("GPU002", facts).outcome == "healthy"


def test_a_try_that_is_refused_is_sick(monkeypatch: pytest.MonkeyPatch, machine: Machine, look: Look) -> None:
    """The words of pytorch#192707, raised by a stand-in for the kernel."""
    machine(rtx5090())
    on_the_cpu(monkeypatch)
    words = "CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling cublasLtMatmulAlgoGetHeuristic\nsecond line"

    def refuse(*arguments: object, **settings: object) -> None:
        raise RuntimeError(words)

    monkeypatch.setattr(torch, "_scaled_mm", refuse)
    finding = finding_of("GPU002", look(float8("rowwise_with_gw_hp")))
    assert finding is not None
    assert (
        finding.title
        == f"rowwise_with_gw_hp does not run here: a tiny matmul raises RuntimeError: {words.splitlines()[0]}"
    )


@pytest.mark.parametrize("model", [linears, mxfp8, lambda: float8("rowwise")])
def test_nothing_is_tried_before_cuda_is_in_use(model: Callable[[], nn.Module], look: Look) -> None:
    assert look(model()).recipe_tries == {}


def test_only_what_the_model_uses_is_tried(monkeypatch: pytest.MonkeyPatch, look: Look) -> None:
    on_the_cpu(monkeypatch)
    assert look(linears()).recipe_tries == {}
    assert look(mxfp8()).recipe_tries == {}
    assert look(float8("tensorwise")).recipe_tries == {"tensorwise": None}


@pytest.fixture
def te(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return stand_in.install(monkeypatch, "quantization")


@pytest.mark.parametrize(
    ("recipe", "device_of", "cuda", "sick"),
    [
        ("MXFP8BlockScaling", h100, "13.0", True),
        ("MXFP8BlockScaling", b200, "13.0", False),
        ("DelayedScaling", l40s, "11.8", True),
        ("DelayedScaling", l40s, "12.4", False),
        ("Float8CurrentScaling", h100, "11.8", False),
    ],
)
def test_transformer_engine(
    recipe: str,
    device_of: Callable[[], Device],
    cuda: str,
    sick: bool,
    te: ModuleType,
    machine: Machine,
    look: Look,
) -> None:
    machine(device_of(), cuda=cuda)
    model = nn.Sequential(te.Linear(64, 64))
    with te.autocast(recipe=getattr(stand_in, recipe)()):
        model(torch.zeros(16, 64))
    assert outcome_of("GPU002", look(model)).outcome == ("sick" if sick else "healthy")


NO_RHT = {"disable_rht": True, "disable_stochastic_rounding": True}


@pytest.mark.parametrize(
    ("device_of", "settings", "version", "outcome"),
    [
        (b200, {}, "2.18.0", "healthy"),
        (rtx5090, {}, "2.18.0", "sick"),
        (rtx5090, {"disable_rht": True}, "2.18.0", "sick"),
        (rtx5090, NO_RHT, "2.18.0", "healthy"),
        (rtx5090, {}, "2.19.0", "healthy"),
        (rtx5090, {}, "2.20.2", "healthy"),
        (rtx5090, {}, None, "unknown"),
        (rtx5090, NO_RHT, None, "healthy"),
        (h100, NO_RHT, "2.20.2", "sick"),
    ],
)
def test_nvfp4_of_transformer_engine_trains_by_default_on_10_x_and_from_2_19_on_12_x(
    device_of: Callable[[], Device],
    settings: dict[str, bool],
    version: str | None,
    outcome: str,
    te: ModuleType,
    machine: Machine,
    look: Look,
) -> None:
    machine(device_of())
    model = nn.Sequential(te.Linear(64, 64))
    with te.autocast(recipe=stand_in.NVFP4BlockScaling(**settings)):
        model(torch.zeros(16, 64))
    facts = look(model)
    packages = {"transformer_engine": Package(version=version, imported=True)}
    facts = msgspec.structs.replace(
        facts, software=msgspec.structs.replace(facts.software, packages=packages)
    )
    assert outcome_of("GPU002", facts).outcome == outcome
    finding = finding_of("GPU002", facts)
    if finding and device_of is rtx5090:
        assert finding.treatment is not None
        assert (
            "NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True)" in finding.treatment.code
        )
        assert "gradients" in finding.explanation


def test_mxfp8_that_accelerate_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, machine: Machine, look: Look
) -> None:
    machine(h100())
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "TE")
    monkeypatch.setenv("ACCELERATE_FP8_USE_MXFP8_BLOCK_SCALING", "true")
    finding = finding_of("GPU002", look(linears()))
    assert finding is not None
    assert finding.treatment is not None
    assert finding.treatment.code == "unset ACCELERATE_FP8_USE_MXFP8_BLOCK_SCALING"
    monkeypatch.delenv("ACCELERATE_FP8_USE_MXFP8_BLOCK_SCALING")
    assert outcome_of("GPU002", look(linears())).outcome == "not_applicable"


@pytest.mark.parametrize("devices", [(), (a100(),)])
def test_without_fp8_tensor_cores_it_is_another_disease(
    devices: tuple[Device, ...], machine: Machine, look: Look
) -> None:
    machine(*devices)
    assert outcome_of("GPU002", look(mxfp8())).outcome == "not_applicable"


@pytest.mark.parametrize(("name", "outcome"), [("RTX5090", "sick"), ("H100", "sick"), ("B200", "healthy")])
def test_a_gpu_that_is_assumed_is_asked_too(name: str, outcome: str, machine: Machine, look: Look) -> None:
    machine()
    facts = msgspec.structs.replace(look(mxfp8()), assumed_gpu=name)
    assert outcome_of("GPU002", facts).outcome == outcome
