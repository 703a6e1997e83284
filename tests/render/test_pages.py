"""The pages of ``trace`` and ``compare``, as files in ``golden/``; UPDATE_GOLDEN=1 writes them again."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from fp8doctor.diagnosis.diagnose import replay
from fp8doctor.diagnosis.document import Tool
from fp8doctor.diagnosis.traces import Traces, conclude
from fp8doctor.diagnosis.two_reports import compared
from fp8doctor.facts.trial import TracedKernel, TracedStep
from fp8doctor.render.command_pages import compare_page, trace_page
from fp8doctor.render.markup import as_html, as_markdown
from fp8doctor.render.page import Page, Quiet, Strong, Table
from fp8doctor.render.text import as_text
from tests.accessible import faults
from tests.render.sound_html import hold_sound, text
from tests.render.test_screens import hold

RECORDED = Path(__file__).parents[1] / "patients" / "recorded"
ABS = "void at::native::vectorized_elementwise_kernel<8, at::native::AbsFunctor<c10::BFloat16>>"
ADAM = "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedOptimizer>"
FLASH = "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x64"


def kernel(family: str, name: str, count: float, ms: float, operator: str | None = None) -> TracedKernel:
    return TracedKernel(name=name, family=family, operator=operator, count=count, time_ms=ms)  # type: ignore[arg-type]


def step(file: str, idle: dict[str, float], *kernels: TracedKernel) -> TracedStep:
    families: dict[str, float] = {}
    for each in kernels:
        families[each.family] = families.get(each.family, 0.0) + each.time_ms
    busy, waits = sum(families.values()), sum(idle.values())
    return TracedStep(
        file=file,
        gpu="NVIDIA H200",
        gpus=1,
        rank=None,
        world_size=None,
        steps=3,
        marked_by="profiler",
        compiling_steps=0,
        compiled=False,
        step_ms=busy + waits,
        low_ms=busy + waits - 1.2,
        high_ms=busy + waits + 2.1,
        busy_ms=busy,
        families_ms=dict(sorted(families.items(), key=lambda item: -item[1])),
        idle_ms=idle,
        outside_ms=0.0,
        with_stack=False,
        kernels=tuple(sorted(kernels, key=lambda each: -each.time_ms)),
    )


BF16 = step(
    "bf16.json",
    {"in_time": 4.1, "late_launch": 1.6},
    kernel("gemm_16bit", "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT", 507, 59.1, "aten::mm"),
    kernel("attention", FLASH, 48, 12.0),
    kernel("pointwise", "triton_poi_fused_silu_mul_1", 290, 19.0),
    kernel("optimizer", ADAM, 12, 2.4, "aten::_fused_adamw_"),
)
FP8 = step(
    "fp8.json",
    {"late_launch": 13.0, "in_time": 2.2},
    kernel("cast", ABS, 3024, 282.7, "aten::abs"),
    kernel("gemm_fp8", "nvjet_sm90_qqtst_256x128_128x4_1x2_h_bz_coopA_TNT", 336, 20.1, "aten::_scaled_mm"),
    kernel("gemm_fp8", "nvjet_sm90_qrtst_128x128_128x6_2x1_v_bz_coopA_TNT", 168, 10.7, "aten::_scaled_mm"),
    kernel("attention", FLASH, 48, 11.0),
    kernel("pointwise", "void at::native::elementwise_kernel<128, 4>", 480, 24.5, "aten::mul"),
    kernel("gemm_16bit", "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT", 3, 4.0, "aten::mm"),
    kernel("optimizer", ADAM, 12, 2.4, "aten::_fused_adamw_"),
    *(kernel("unknown", f"my_own_kernel_{number}", 2 / 3, 0.1) for number in range(7)),
)
HOST_BOUND = replace(
    step("b.json", {"data_loader": 0.61, "late_launch": 0.42}, kernel("gemm_fp32", "ampere_sgemm", 9, 0.317)),
    rank=3,
    world_size=8,
    gpus=2,
    steps=0,
    marked_by=None,
    with_stack=True,
    compiled=True,
    outside_ms=1.5,
)


def pages() -> dict[str, Callable[[], Page]]:
    def page(step: TracedStep, verbose: bool = False) -> Callable[[], Page]:
        return lambda: trace_page(of(step), verbose=verbose)

    def reports(first: str, second: str) -> Callable[[], Page]:
        def compare() -> Page:
            both = replay(RECORDED / f"h200-{first}.json.gz"), replay(RECORDED / f"h200-{second}.json.gz")
            found = compared(*both, (f"{first}.json", f"{second}.json"))
            return compare_page(replace(found, tool=Tool(version="0")), both)

        return compare

    return {
        "trace": page(FP8),
        "trace_verbose": page(FP8, verbose=True),
        "trace_host_bound": page(HOST_BOUND),
        "trace_by_optimizer": page(replace(BF16, marked_by="optimizer", steps=1, compiling_steps=2)),
        "compare": reports("decoder_468m", "decoder_468m_compiled"),
        "compare_unlike": reports("llama_8b", "te_autocast"),
        "compare_untimed": reports("moe", "te_autocast"),
    }


def of(step: TracedStep) -> Traces:
    return replace(conclude(step), tool=Tool(version="0"))


PAGES = pages()

GOLDEN = ("trace", "compare", "compare_unlike")
"""Pages with a file of their own; the others have the same parts, except in `test_a_narrow_page`."""


@pytest.mark.parametrize("name", PAGES)
def test_pages(name: str) -> None:
    sheet = PAGES[name]()
    if name in GOLDEN:
        hold(f"page_{name}.txt", as_text(sheet, width=100))
    said = text(hold_sound(as_html(sheet)))
    assert faults(as_html(sheet)) == []
    cells = [cell for part in sheet.parts if isinstance(part, Table) for row in part.rows for cell in row]
    prose = [part.text for part in sheet.parts if isinstance(part, Quiet | Strong)]
    assert all(" ".join(each.split()) in said for each in (*prose, *cells))
    for width in (40, 79, 80, 100, 120):
        lines = as_text(sheet, width=width).splitlines()
        assert all(line == line.rstrip() for line in lines)
        if width >= 79:
            assert max(map(len, lines)) <= width
    assert as_text(sheet, width=100, ascii=True).isascii()
    coloured = as_text(sheet, width=100, colour=True)
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == as_text(sheet, width=100)


def test_a_narrow_page() -> None:
    hold("page_trace.narrow_ascii.txt", as_text(PAGES["trace"](), width=80, ascii=True))


def test_nothing_of_a_trace_steers_a_terminal_or_markdown() -> None:
    bad = "a\x1b[31m|<script>`\n# b"
    sheet = trace_page(of(replace(FP8, file=bad, gpu=bad, kernels=(kernel("unknown", bad, 1, 300.0),))))
    assert "\x1b" not in as_text(sheet, width=100)
    assert "\n#" not in as_text(sheet, width=100)
    assert "\n#" not in as_html(sheet)
    assert "<script>" not in as_markdown(sheet)
    assert "\n# b" not in as_markdown(sheet)
    hold_sound(as_html(sheet))
