"""The machine without a model: one line says whether it can train in FP8, a line each what is there."""

from typing import Any

import pytest
from msgspec.structs import replace

from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.facts import Environment, Facts, Gpu, Package, Software, Target
from fp8doctor.render import text
from fp8doctor.render.markup import as_markdown
from fp8doctor.render.report_page import page

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

BLANK = Environment(variables={}, backend_imports={}, debug_switches={})


def facts(
    *gpus: Gpu,
    torch: dict[str, Any] = CUDA,
    packages: Any = TORCHAO,
    cudnn: str | None = None,
    **environment: Any,
) -> Facts:
    return Facts(
        target=Target(kind="environment", name="environment", attribute=None),
        software=Software(
            python="3.12.3", driver="580.95", packages=packages, cudnn=cudnn, **{"hip": None, **torch}
        ),
        environment=replace(BLANK, **environment),
        gpus=gpus,
        gaps={},
    )


@pytest.mark.parametrize(
    ("found", "mark", "command"),
    [
        (facts(H200), "✓", ""),
        (facts(H200, A100), "✓", ""),
        (facts(H200, packages=TORCHAO | TE), "✓", ""),
        (facts(B200), "✓", ""),
        (facts(MI300X, torch=ROCM), "✓", ""),
        (facts(H200, packages={"torchao": OLD}), "✗", "pip install torchao --upgrade"),
        (facts(H200, packages=TE, cudnn="9.10.2.21"), "✗", "pip install --upgrade --no-build-isolation"),
        (facts(A100), "✗", "fp8doctor model.py --assume-gpu H200"),
        (facts(H200, packages={}), "✗", "pip install torchao"),
        (facts(H200, torch=CPU), "✗", "pip install --force-reinstall torch --index-url"),
        (facts(), "!", "fp8doctor model.py --assume-gpu H200"),
        (facts(H200, variables={"FP8_BACKEND": "te"}), "!", "unset FP8_BACKEND"),
    ],
)
def test_the_machine_can_train_in_fp8_or_a_command_helps(found: Facts, mark: str, command: str) -> None:
    report = diagnose(found)
    for width in (60, 120):
        screen = text.render(report, width=width)
        assert screen.splitlines()[2].startswith(f"{mark} ")
        assert not command or f"  {command}" in screen
    assert command in as_markdown(page(report))


def test_rocm_has_no_nvidia_driver_to_miss() -> None:
    found = facts(MI300X, torch=ROCM)
    report = diagnose(replace(found, software=replace(found.software, driver=None)))
    assert "NVIDIA driver" not in text.render(report)
