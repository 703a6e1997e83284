"""ENV004 on real broken packages, and on the texts that the known ways of being broken give."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from torch import nn

from fp8doctor.checks.environment.fp8_backend_missing import FIRES
from fp8doctor.examine import examine_surroundings
from fp8doctor.examine.environment import CUTEDSL
from fp8doctor.facts import Environment, Facts, Gpu, Package, Software, Target
from tests import prototypes
from tests.checks.environment.live import finding_of, outcome_of
from tests.stand_ins.packages import stand_in

SYMBOL = (
    "libtransformer_engine.so: undefined symbol: "
    "cublasLtGroupedMatrixLayoutInit_internal, version "
    "libcublasLt.so.13"
)


def here() -> Facts:
    return examine_surroundings(Target(kind="environment", name="environment"))


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A transformer_engine 2.14.1 whose torch part cannot be imported; the empty torch beside it saves its
    import."""
    folder = tmp_path / "transformer_engine" / "pytorch"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").write_text(
        "try:\n    from . import pytorch\nexcept ImportError:\n    pass"
    )
    (folder / "__init__.py").write_text(f"raise ImportError({SYMBOL!r})")
    (tmp_path / "torch.py").touch()
    metadata = tmp_path / "transformer_engine-2.14.1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: transformer_engine\nVersion: 2.14.1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "TE")
    return folder / "__init__.py"


def test_a_half_installed_backend_gives_the_real_reason(package: Path) -> None:
    finding = finding_of("ENV004", here())
    assert finding is not None
    assert finding.severity == "error"
    assert finding.title == "The FP8 backend transformer_engine 2.14.1 cannot be imported"
    assert finding.evidence["error"] == f"ImportError: {SYMBOL}"
    assert "newer cuBLAS" in finding.explanation
    assert finding.treatment is not None
    assert finding.treatment.code.startswith(
        'pip install --no-build-isolation "transformer-engine[pytorch]>=2.17'
    )


def test_a_package_that_imports_is_healthy(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fp8doctor.examine.fp8_support import try_import

    try_import.cache_clear()
    package.write_text("")
    assert outcome_of("ENV004", here()).outcome == "healthy"


def test_transformer_engine_is_really_missing_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "TE")
    facts = here()
    if "transformer_engine" in facts.software.packages:
        pytest.skip("Transformer Engine is installed")
    finding = finding_of("ENV004", facts)
    assert finding is not None
    assert "It is not installed." in finding.explanation
    without_gpu = msgspec.structs.replace(facts, gpus=())
    with_gpu = msgspec.structs.replace(facts, gpus=(Gpu(name="NVIDIA H200"),))
    assert [
        (found.severity, "this machine does not have" in found.explanation)
        for each in (without_gpu, with_gpu)
        if (found := finding_of("ENV004", each))
    ] == [("warning", True), ("error", False)]
    assert finding.treatment is not None
    assert (
        'pip install --upgrade --no-build-isolation "transformer-engine[pytorch]>=2.17'
        in finding.treatment.code
    )


def test_nothing_asked_nothing_to_say() -> None:
    assert outcome_of("ENV004", here()).outcome == "not_applicable"


@pytest.mark.parametrize(
    ("error", "said", "line"),
    [
        (f"OSError: {SYMBOL}", "newer cuBLAS", "transformer-engine[pytorch]>=2.17"),
        (
            "OSError: /usr/lib/libcudnn_cnn.so.9: undefined symbol: "
            "_ZN5cudnn7backend, version "
            "libcudnn_graph.so.9",
            "two cuDNN versions",
            "LD_LIBRARY_PATH",
        ),
        (
            "ImportError: libcudnn_adv.so.9: cannot open shared object file: No such file or directory",
            "does not find this cuDNN",
            "LD_LIBRARY_PATH",
        ),
        (
            "RuntimeError: Transformer Engine requires cuDNN 9.12.0 or later, but the cuDNN runtime is "
            "9.10.2.",
            "need cuDNN 9.12",
            "nvidia-cudnn-cu12",
        ),
        ("RuntimeError: cudnn shared object not found.", "does not find this cuDNN", "LD_LIBRARY_PATH"),
        (
            "ImportError: …/transformer_engine_torch.cpython-311-x86_64-linux-gnu.so: "
            "undefined symbol: "
            "_ZN3c106detail14torchCheckFailEPKcS2_jRKNSt7",
            "built for another torch",
            "--no-deps --no-build-isolation transformer_engine_torch",
        ),
        (
            "FileNotFoundError: Could not find shared object file for Transformer Engine torch lib.",
            "not installed",
            "transformer-engine[pytorch]",
        ),
        (
            "RuntimeError: Found empty `transformer-engine` meta package installed. Install ...",
            "not installed",
            "transformer-engine[pytorch]",
        ),
        (
            "AssertionError: Transformer Engine package version mismatch. Found "
            "transformer-engine "
            "v2.20.2 and transformer-engine-cu13 v2.19.0.",
            "different versions",
            "--force-reinstall",
        ),
        ("ZeroDivisionError: division by zero", "ZeroDivisionError", "transformer-engine[pytorch]"),
    ],
)
def test_known_ways_of_being_broken_are_explained(error: str, said: str, line: str) -> None:
    finding = finding_of(
        "ENV004",
        msgspec.structs.replace(FIRES, environment=Environment(variables={}, backend_imports={"TE": error})),
    )
    assert finding is not None
    assert said in finding.explanation
    assert error.rstrip(".") in finding.explanation
    assert finding.treatment is not None
    assert line in finding.treatment.code


def test_no_backend_at_all() -> None:
    asked = Environment(variables={"ACCELERATE_MIXED_PRECISION": "fp8"}, backend_imports={})
    alone = Software(packages={"accelerate": Package(version="1.15.0", imported=False)})
    finding = finding_of("ENV004", msgspec.structs.replace(FIRES, environment=asked, software=alone))
    assert finding is not None
    assert finding.title == "FP8 was asked for, but no FP8 backend is installed"
    both = Software(packages={**alone.packages, "torchao": Package(version="0.18.0", imported=False)})
    assert (
        outcome_of("ENV004", msgspec.structs.replace(FIRES, environment=asked, software=both)).outcome
        == "not_applicable"
    )


def test_nvfp4_layers_of_torchao_need_no_compiled_kernels(
    look: Callable[..., Facts], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are Triton's."""
    linear = prototypes.module("nvfp4_training.nvfp4_training").NVFP4Linear
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.ops, "loaded_libraries", set())
    facts = look(nn.Sequential(linear(128, 128)))
    assert [each.recipe for each in facts.network.linears] == ["nvfp4"]
    assert facts.software.torchao_libraries == 0
    assert outcome_of("ENV004", facts).outcome == "not_applicable"


def test_mx_layers_without_torchaos_kernels(
    look: Callable[..., Facts], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU build of torch loads none of torchao's libraries; a CUDA build is stood in for by its version."""
    from torchao.quantization import quantize_

    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.ops, "loaded_libraries", set())
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).bfloat16()
    quantize_(model, prototypes.mxfp8(), filter_fn=lambda module, name: isinstance(module, nn.Linear))
    assert outcome_of("ENV004", look(model)).outcome == "not_applicable"
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    facts = look(model)
    assert facts.software.torchao_libraries == 0
    finding = finding_of("ENV004", facts)
    assert finding is not None
    assert finding.severity == "warning"
    assert "2 layers need them" in finding.title
    loaded = msgspec.structs.replace(
        facts, software=msgspec.structs.replace(facts.software, torchao_libraries=2)
    )
    assert outcome_of("ENV004", loaded).outcome == "not_applicable"


def titans_experts() -> nn.Module:
    """As torchtitan tells its experts to multiply in MXFP8."""
    experts = type("GroupedExperts", (nn.Module,), {"_mxfp8_op_config": prototypes.mxfp8()})()
    experts.top_k = 2
    experts.w1 = nn.Parameter(torch.zeros(4, 64, 32))
    return nn.Sequential(experts)


def install_only(monkeypatch: pytest.MonkeyPatch, *present: str) -> None:
    """Of what kernels in CuTe DSL need only these are there: a CUDA build of torch brings cuda-bindings."""
    names = (each for names in CUTEDSL.values() for each in names)
    stand_in(monkeypatch, **{name: "1.0" if name in present else None for name in names})


@pytest.mark.parametrize(
    ("present", "missing"),
    [
        ((), ["nvidia-cutlass-dsl", "apache-tvm-ffi", "cuda-python"]),
        (("cuda_bindings",), ["nvidia-cutlass-dsl", "apache-tvm-ffi"]),
        (("cuda_python", "apache_tvm_ffi"), ["nvidia-cutlass-dsl"]),
    ],
)
def test_mxfp8_experts_without_the_packages_of_their_casts(
    present: tuple[str, ...], missing: list[str], look: Callable[..., Facts], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchao 0.18 is here; a B200, a CUDA build and the packages are stood in for."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    install_only(monkeypatch, *present)
    facts = msgspec.structs.replace(look(titans_experts()), gpus=(B200,))
    finding = finding_of("ENV004", facts)
    assert finding is not None
    assert (finding.severity, finding.breaks) == ("error", "step_raises")
    assert finding.title == f"1 layer with MXFP8 experts cannot run: {', '.join(missing)} missing"
    assert finding.treatment is not None
    (line,) = finding.treatment.code.splitlines()
    assert line.startswith("pip install nvidia-cutlass-dsl==")
    assert line.endswith(" ".join(missing[1:]))


def test_mxfp8_experts_with_the_packages_of_their_casts(
    look: Callable[..., Facts], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    install_only(monkeypatch, "nvidia_cutlass_dsl", "apache_tvm_ffi", "cuda_bindings")
    facts = msgspec.structs.replace(look(titans_experts()), gpus=(B200,))
    assert facts.software.cutedsl_missing == ()
    with_kernels = msgspec.structs.replace(facts.software, torchao_libraries=2)
    assert finding_of("ENV004", msgspec.structs.replace(facts, software=with_kernels)) is None


def test_where_mxfp8_experts_do_not_run_anyway(
    look: Callable[..., Facts], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a Hopper GPU002 says so; without a GPU nothing is known of the one that will train."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    facts = look(titans_experts())
    for gpus in ((), (msgspec.structs.replace(B200, name="NVIDIA H100", compute_capability="9.0"),)):
        finding = finding_of("ENV004", msgspec.structs.replace(facts, gpus=gpus))
        assert finding is None or "MXFP8 experts cannot run" not in finding.title


B200 = Gpu(name="NVIDIA B200", vendor="nvidia", compute_capability="10.0", visible=True)
