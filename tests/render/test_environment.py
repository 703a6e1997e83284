"""The machine without a model: one line says whether it can train in FP8, a line each what is there."""

from __future__ import annotations

from typing import Any

import pytest

from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.facts import AccelerateConfig, Environment, Facts, Gpu, Package, Software, Target
from fp8doctor.render import markdown, text

H200 = Gpu(name="NVIDIA H200", vendor="nvidia", compute_capability="9.0", visible=True)
B200 = Gpu(name="NVIDIA B200", vendor="nvidia", compute_capability="10.0", visible=True)
MI300X = Gpu(
    name="AMD Instinct MI300X", vendor="amd", compute_capability=None, architecture="gfx942", visible=True
)
A100 = Gpu(name="NVIDIA A100-SXM4-80GB", vendor="nvidia", compute_capability="8.0", visible=True)
TORCHAO = {"torchao": Package(version="0.18.0", imported=False)}
OLD = Package(version="0.5.0", imported=False)
TE = {"transformer_engine": Package(version="2.20.0", imported=False)}
CUDA = {"torch": "2.11.0+cu130", "cuda": "13.0"}
CPU = {"torch": "2.11.0+cpu", "cuda": None}
ROCM = {"torch": "2.11.0+rocm7.1", "cuda": None, "hip": "7.1"}

WITH = "✓ This machine can train in FP8 with"
BY_TORCHAO = "tensorwise, rowwise, rowwise with BF16 weight gradients"


def facts(
    *gpus: Gpu,
    torch: dict[str, Any] = CUDA,
    packages: Any = TORCHAO,
    variables: Any = (),
    config: AccelerateConfig | None = None,
    cudnn: str | None = None,
) -> Facts:
    return Facts(
        target=Target(kind="environment", name="environment", attribute=None),
        software=Software(
            python="3.12.3",
            platform="linux x86_64",
            driver="580.95",
            packages=packages,
            cudnn=cudnn,
            **{"hip": None, **torch},
        ),
        environment=Environment(
            variables=dict(variables),
            deepspeed_fp8_section=None,
            backend_imports={},
            debug_switches={},
            accelerate_config=config,
        ),
        gpus=gpus,
        gaps={},
    )


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        (facts(H200), f"{WITH} {BY_TORCHAO} (torchao 0.18)\n"),
        (facts(H200, A100), f"{WITH} {BY_TORCHAO} (torchao 0.18)\n"),
        (
            facts(H200, packages=TORCHAO | TE),
            f"{WITH} {BY_TORCHAO} (torchao 0.18) and delayed scaling, current scaling, block scaling "
            "(Transformer Engine 2.20)\n",
        ),
        (
            facts(H200, packages={"transformer_engine": Package(version="2.1.0", imported=False)}),
            f"{WITH} delayed scaling (Transformer Engine 2.1)\n",
        ),
        (
            facts(B200, packages=TORCHAO),
            f"{WITH} {BY_TORCHAO}, MXFP8 block scaling (torchao 0.18)\n",
        ),
        (facts(MI300X, torch=ROCM), f"{WITH} {BY_TORCHAO} (torchao 0.18)\n"),
        (
            facts(H200, packages={"torchao": OLD}),
            "✗ This machine cannot train in FP8 yet: no FP8 library works here",
        ),
        (
            facts(H200, packages=TE, cudnn="9.10.2.21"),
            "✗ This machine cannot train in FP8 yet: no FP8 library works here",
        ),
        (facts(A100), "✗ This machine cannot train in FP8: no GPU with FP8 tensor cores"),
        (facts(H200, packages={}), "✗ This machine cannot train in FP8 yet: no FP8 library is installed"),
        (facts(H200, torch=CPU), "✗ This machine cannot train in FP8: torch is built without CUDA"),
        (facts(), "! No GPU here: FP8 cannot be timed on this machine\n"),
        (
            facts(H200, variables={"FP8_BACKEND": "te"}),
            f"! This machine can train in FP8 with {BY_TORCHAO} (torchao 0.18); 1 issue below",
        ),
        (
            facts(H200, config=AccelerateConfig(mixed_precision="fp8", fp8_backend="TE")),
            f"! This machine can train in FP8 with {BY_TORCHAO} (torchao 0.18); 1 issue below",
        ),
    ],
)
def test_one_line_says_whether_the_machine_can_train_in_fp8(found: Facts, verdict: str) -> None:
    screen = text.render(diagnose(found), width=1000)
    assert verdict in screen
    assert "╭" not in screen
    assert "No model was examined" not in screen
    assert verdict[2:].strip() in markdown.render(diagnose(found))


def test_the_list_names_what_is_there_and_what_lacks() -> None:
    lines = text.render(diagnose(facts(H200, H200))).splitlines()
    assert "✓ torch               2.11.0, CUDA 13.0" in lines
    assert "✓ driver              580.95" in lines
    assert "✓ GPU                 2 x NVIDIA H200, 9.0: FP8 tensorwise, rowwise, block scaling" in lines
    assert "✓ torchao             0.18.0" in lines
    assert "– Transformer Engine  not installed" in lines
    assert "– DeepSpeed           not installed" in lines
    assert "– Accelerate config   no default file" in lines


@pytest.mark.parametrize(
    ("config", "line"),
    [
        (("fp8", "AO"), "✓ Accelerate config   mixed_precision fp8, FP8 backend AO"),
        (("fp8", None), "✓ Accelerate config   mixed_precision fp8"),
        (("bf16", None), "i Accelerate config   mixed_precision bf16"),
        (("fp8", "TE"), "✗ Accelerate config   mixed_precision fp8, FP8 backend TE, which is not installed"),
    ],
)
def test_the_file_that_accelerate_launch_reads(config: tuple[str, str | None], line: str) -> None:
    precision, backend = config
    found = AccelerateConfig(mixed_precision=precision, fp8_backend=backend)
    assert line in text.render(diagnose(facts(H200, config=found)), width=120).splitlines()


@pytest.mark.parametrize(
    ("found", "command"),
    [
        (facts(H200, packages={}), "pip install torchao"),
        (facts(A100), "fp8doctor model.py --assume-gpu H200"),
        (facts(H200, packages={"torchao": OLD}), "pip install torchao --upgrade"),
        (facts(H200, packages=TE, cudnn="9.10.2.21"), "pip install --upgrade --no-build-isolation"),
        (
            facts(H200, config=AccelerateConfig(mixed_precision="fp8", fp8_backend="TE")),
            "pip install --upgrade --no-build-isolation",
        ),
        (facts(H200, torch=CPU), "pip install --force-reinstall torch --index-url"),
        (facts(), "fp8doctor model.py --assume-gpu H200"),
        (facts(H200, variables={"FP8_BACKEND": "te"}), "unset FP8_BACKEND"),
    ],
)
def test_a_bad_line_has_its_command(found: Facts, command: str) -> None:
    for width in (60, 120):
        assert f"  {command}" in text.render(diagnose(found), width=width)
    assert command in markdown.render(diagnose(found))


@pytest.mark.parametrize("ascii", [True, False])
@pytest.mark.parametrize("width", [60, 80])
def test_no_line_of_the_list_is_wider_than_the_terminal(width: int, ascii: bool) -> None:
    many = {f"NVTE_{each}": "1" for each in ("DEBUG", "FLASH_ATTN", "FUSED_ATTN", "UNFUSED_ATTN")}
    screen = text.render(diagnose(facts(H200, variables=many)), width=width, ascii=ascii, verbose=True)
    assert max(map(len, screen.splitlines())) <= width
    assert screen.isascii() is ascii
