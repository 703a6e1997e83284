"""Time what padding an odd vocabulary saves, as SHP008 advises: ``python
tests/benchmarks/padded_vocabulary.py OUT.json``

Builds the patient decoder_454m with its vocabulary of 50257 and padded to a multiple of 64, and times its
step as `plain_step.py` does: BF16 and FP8 compiled block by block, FP8 eager. Both train on the same tokens.
Then times the head's three GEMMs alone, as `gemm_sweep.py` does. Beside what was measured it prints what
SHP008 models of the recorded patient on this GPU. About a minute of one GPU; OUT.json is written anew after
every measurement. ``--tiny`` tries the script on a CPU, whose times mean nothing.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from tabulate import tabulate

from fp8doctor import load_report
from fp8doctor.cost import modelled_gpu
from fp8doctor.facts import Facts, Gpu
from tests.benchmarks import plain_step
from tests.benchmarks.gemm_sweep import ROLES, Sweep
from tests.benchmarks.jobs.plain import DEVICE, changes
from tests.benchmarks.machine import machine

PATIENTS = Path(__file__).resolve().parents[1] / "patients"
PATIENT = PATIENTS / "decoder_454m.py"
RECORDED = PATIENTS / "recorded" / "h200-decoder_454m_compiled.json.gz"
"""The patient with every block compiled; it was not timed, so SHP008 models its whole step."""

MULTIPLE = 64
"""Elements that SHP008 pads to."""

COMPILED_FP8 = "FP8 tensorwise, compiled by block"
"""What the recorded patient is."""

VARIANTS = {
    "BF16, compiled by block": "bf16_compiled",
    COMPILED_FP8: "compile-blocks",
    "FP8 tensorwise, eager": "as_is",
}
"""The changes of `jobs/plain.py` that make each out of the patient, which converts itself and compiles
nothing."""

REPEATS = 3
"""Measurements of each GEMM, of which the median is taken; each is a mean of 15 calls."""

TINY_VOCABULARY, TINY_LAYERS, TINY_BATCH = 257, 1, (2, 16)

HOW = (
    "steps: tests/benchmarks/plain_step.py, fused AdamW, tied head in BF16, random BF16 weights, the same "
    "tokens for both vocabularies, one process; left_gib was allocated before the step was built. "
    "head_gemms: torch.mm in BF16 laid out as in training (tests/benchmarks/gemm_sweep.py), median of "
    f"{REPEATS}. modelled: finding SHP008 of tests/patients/recorded/{RECORDED.name} with this GPU assumed."
)


def padded(vocabulary: int) -> int:
    """Return the next multiple of `MULTIPLE`."""
    return -(-vocabulary // MULTIPLE) * MULTIPLE


def gpu_name() -> str | None:
    """Name the GPU; None without one."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def job_of(patient: Any, vocabulary: int, tokens: torch.Tensor, layers: int) -> SimpleNamespace:
    """Make a job of the patient with another vocabulary, trained on these tokens."""

    def build_model() -> torch.nn.Module:
        before = patient.VOCABULARY, patient.DEVICE
        patient.VOCABULARY, patient.DEVICE = vocabulary, DEVICE  # its classes read them when they are built
        try:
            model: torch.nn.Module = patient.build_model(layers)
        finally:
            patient.VOCABULARY, patient.DEVICE = before
        return model

    return SimpleNamespace(
        build_model=build_model,
        example_batch=lambda: tokens,
        loss=patient.loss,
        VARIANTS=changes("blocks", skip=("head",)),
    )


def timed_step(job: SimpleNamespace, change: str) -> dict[str, float | None]:
    """Time a variant's step with nothing left of the one before it."""
    torch.compiler.reset()
    gc.collect()
    torch.cuda.empty_cache()
    cuda = torch.cuda.is_available()
    left = torch.cuda.memory_allocated() / 2**30 if cuda else None
    torch.manual_seed(0)
    step = plain_step.training_step(job, [change])
    plain_step.compiled(step)
    return {**(plain_step.timed(step) if cuda else plain_step.tried(step)), "left_gib": left}


def head_gemms(vocabularies: Sequence[int], tokens: int, width: int, *, tiny: bool) -> list[dict[str, Any]]:
    """Time the head's GEMMs alone, the vocabularies in turn."""
    sweep = Sweep(DEVICE, seconds=0.0, tiny=tiny)
    found: dict[tuple[int, str], list[float]] = {
        (vocabulary, role): [] for role in ROLES for vocabulary in vocabularies
    }
    for _ in range(REPEATS):
        for (vocabulary, role), times in found.items():
            times.append(sweep.timer.ms(*sweep.gemm("bf16", role, tokens, width, vocabulary)))
    return [
        {
            "role": role,
            "vocabulary": vocabulary,
            "tokens": tokens,
            "width": width,
            "ms": statistics.median(times),
            "each_ms": times,
        }
        for (vocabulary, role), times in found.items()
    ]


def modelled(gpu: str | None) -> dict[str, Any] | None:
    """Return what SHP008 models of the recorded patient on a GPU of this name, on an H100 without one; None
    where it has no datasheet, or the check does not fire."""
    spec = modelled_gpu(Facts(gpus=(Gpu(name=gpu),) if gpu else ()))
    if spec is None:
        return None
    report = load_report(RECORDED, assume_gpu=spec.name, select=("SHP008",))
    for finding in report.findings:
        if finding.saving_ms is not None:
            keys = ("now_ms", "padded_ms", "step_ms")
            return {
                "gpu": finding.saving_ms.gpu,
                "saved_ms": [finding.saving_ms.low, finding.saving_ms.high],
                **{key: finding.evidence[key] for key in keys},
            }
    return None


def table(result: dict[str, Any]) -> str:
    """Write the numbers as Markdown, what they ran on above them."""
    odd, even = result["vocabularies"]
    steps = {(each["variant"], each["vocabulary"]): each for each in result["steps"]}
    gemms = {(each["role"], each["vocabulary"]): each["ms"] for each in result["head_gemms"]}
    total = {width: sum(gemms[role, width] for role in ROLES) for width in (odd, even)}
    in_gemms, rows = total[odd] - total[even], []
    for variant in VARIANTS:
        now, then = steps[variant, odd], steps[variant, even]
        saved = now["step_ms"] - then["step_ms"]
        rows.append(
            {
                "step": variant,
                f"{odd}: ms": f"{now['step_ms']:.1f}",
                "GiB": shown(now["peak_gib"]),
                f"{even}: ms": f"{then['step_ms']:.1f}",
                "GiB ": shown(then["peak_gib"]),
                "saved ms": f"{saved:.1f}",
                "of the step": f"{100 * saved / now['step_ms']:.0f} %",
                "of that the head's GEMMs": f"{100 * in_gemms / saved:.0f} %" if saved > 0 else "–",
            }
        )
    alone = [
        {
            "GEMM of the head, alone": role,
            f"{odd}: ms": f"{now:.2f}",
            f"{even}: ms": f"{then:.2f}",
            "saved ms": f"{now - then:.2f}",
        }
        for role, now, then in (
            *((role.replace("_", " "), gemms[role, odd], gemms[role, even]) for role in ROLES),
            ("all three", total[odd], total[even]),
        )
    ]
    parts = [result["machine"], as_markdown(rows), as_markdown(alone)]
    told = result["modelled"]
    if told:
        now, then = steps[COMPILED_FP8, odd]["step_ms"], steps[COMPILED_FP8, even]["step_ms"]
        low, high = told["saved_ms"]
        beside = [
            ("GEMMs of the head, ms", f"{told['now_ms']:.1f}", f"{total[odd]:.1f}"),
            ("the same, padded", f"{told['padded_ms']:.1f}", f"{total[even]:.1f}"),
            ("a step of compiled FP8, ms", f"{told['step_ms']:.1f}", f"{now:.1f}"),
            ("saved of it by padding, ms", f"{low:.1f} to {high:.1f}", f"{now - then:.1f}"),
        ]
        names = ("SHP008", f"modelled on {told['gpu']}", "measured")
        parts.append(as_markdown([dict(zip(names, row, strict=True)) for row in beside]))
    else:
        parts.append("SHP008 models nothing on this GPU.")
    return "\n\n".join(parts)


def as_markdown(rows: Sequence[dict[str, str]]) -> str:
    """Write rows as a table of Markdown, their keys above it."""
    return tabulate(rows, headers="keys", tablefmt="github", disable_numparse=True)


def shown(gib: float | None) -> str:
    """Write gibibytes; a dash on a CPU."""
    return "–" if gib is None else f"{gib:.1f}"


def measured(result: dict[str, Any], *, tiny: bool, keep: Callable[[], object]) -> None:
    """Measure everything into ``result``, and keep it after every part."""
    began = time.monotonic()
    patient: Any = plain_step.loaded(PATIENT)
    vocabulary, layers = (TINY_VOCABULARY, TINY_LAYERS) if tiny else (patient.VOCABULARY, 24)
    torch.manual_seed(0)
    tokens = torch.randint(vocabulary, TINY_BATCH, device=DEVICE) if tiny else patient.example_batch()
    with torch.device("meta"):
        width = patient.GPT(layers=0).head.in_features
    if torch.cuda.is_available():
        plain_step.idle_share(lambda: None, 1.0)  # what a first profile leaves in the process, all steps have
    result |= {"vocabularies": [vocabulary, padded(vocabulary)], "batch": list(tokens.shape), "steps": []}

    def told(what: str) -> None:
        result["seconds"] = round(time.monotonic() - began, 1)
        keep()
        print(f"{result['seconds']:.0f} s: {what}", file=sys.stderr, flush=True)

    for variant, change in VARIANTS.items():
        for each in result["vocabularies"]:
            step = timed_step(job_of(patient, each, tokens, layers), change)
            result["steps"].append({"variant": variant, "vocabulary": each, **step})
            told(f"{variant}, {each}: {step['step_ms']:.1f} ms")
    gc.collect()
    result["head_gemms"] = head_gemms(result["vocabularies"], tokens.numel(), width, tiny=tiny)
    told("the head's GEMMs")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the tables and write the numbers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args(arguments)
    gpu = gpu_name()
    if gpu is None and not given.tiny:
        print("no GPU; --tiny only shows that the code runs", file=sys.stderr)
        return 1
    where = f"{gpu or 'no GPU'} · {machine(('torch', 'torchao'))}"
    result: dict[str, Any] = {
        "what": "One training step of the patient decoder_454m with its vocabulary as it is and padded to a "
        f"multiple of {MULTIPLE}, and its head's GEMMs alone; times in ms.",
        "how": HOW,
        "gpu": gpu or "none",
        "machine": f"{where} · tiny, its times mean nothing" if given.tiny else where,
        "versions": {name: metadata.version(name) for name in ("torch", "torchao")}
        | {"python": platform.python_version(), "cuda": torch.version.cuda},
        "date": datetime.now(UTC).date().isoformat(),
        "modelled": modelled(gpu),
    }

    def keep() -> None:
        given.out.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", "utf-8")

    measured(result, tiny=given.tiny, keep=keep)
    print(table(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
