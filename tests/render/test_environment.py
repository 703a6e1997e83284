"""The machine without a model: one line says whether it can train in FP8, a line each what is there."""

from __future__ import annotations

from typing import Any

import pytest

from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.facts import Environment, Facts, Gpu, Package, Software, Target
from fp8doctor.render import markdown, text

H200 = Gpu(name="NVIDIA H200", vendor="nvidia", compute_capability="9.0", visible=True)
A100 = Gpu(name="NVIDIA A100-SXM4-80GB", vendor="nvidia", compute_capability="8.0", visible=True)
TORCHAO = {"torchao": Package(version="0.18.0", imported=False)}
CUDA = {"torch": "2.11.0+cu130", "cuda": "13.0"}
CPU = {"torch": "2.11.0+cpu", "cuda": None}


def facts(*gpus: Gpu, torch: dict[str, Any] = CUDA, packages: Any = TORCHAO, variables: Any = ()) -> Facts:
    return Facts(
        target=Target(kind="environment", name="environment", attribute=None),
        software=Software(
            python="3.12.3", platform="linux x86_64", hip=None, driver="580.95", packages=packages, **torch
        ),
        environment=Environment(
            variables=dict(variables), deepspeed_fp8_section=None, backend_imports={}, debug_switches={}
        ),
        gpus=gpus,
        gaps={},
    )


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        (facts(H200), "✓ This machine can train in FP8\n"),
        (facts(H200, A100), "✓ This machine can train in FP8\n"),
        (facts(A100), "✗ This machine cannot train in FP8: no GPU with FP8 tensor cores"),
        (facts(H200, packages={}), "✗ This machine cannot train in FP8 yet: no FP8 library is installed"),
        (facts(H200, torch=CPU), "✗ This machine cannot train in FP8: torch is built without CUDA"),
        (facts(), "! No GPU here: FP8 cannot be timed on this machine\n"),
        (
            facts(H200, variables={"FP8_BACKEND": "te"}),
            "! This machine can train in FP8; 1 issue below",
        ),
    ],
)
def test_one_line_says_whether_the_machine_can_train_in_fp8(found: Facts, verdict: str) -> None:
    screen = text.render(diagnose(found))
    assert verdict in screen
    assert "╭" not in screen
    assert "No model was examined" not in screen
    assert verdict[2:].strip() in markdown.render(diagnose(found))


def test_the_list_names_what_is_there_and_what_lacks() -> None:
    lines = text.render(diagnose(facts(H200, H200))).splitlines()
    assert "✓ torch               2.11.0, CUDA 13.0" in lines
    assert "✓ driver              580.95" in lines
    assert "✓ GPU                 2 x NVIDIA H200, 9.0, FP8" in lines
    assert "✓ torchao             0.18.0" in lines
    assert "– Transformer Engine  not installed" in lines


@pytest.mark.parametrize(
    ("found", "command"),
    [
        (facts(H200, packages={}), "pip install torchao"),
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
