"""Which real object makes each check fire, and which leaves it silent, as Markdown: ``python -m
research.matrix``.

The facts come from examine: the patients in their workers, recordings of GPUs, jobs of the tests on a CPU,
and machines and layers of Transformer Engine that a stand-in answers for. Exits with 1 when a check was never
seen sick or never seen healthy.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from tabulate import tabulate

from fp8doctor import registry
from fp8doctor.diagnosis.document import read_saved
from fp8doctor.facts import Facts, Target, Workload
from tests.clinic import examined, patients
from tests.recordings import files, name_of
from tests.stand_ins import nvml, transformer_engine
from tests.stand_ins.accelerate_state import accelerator

RECORDED = tuple(
    Path(__file__).parents[1] / "tests" / of / "recorded" for of in ("patients", "running", "versions")
)

NAMES_SHOWN = 4
"""Objects that are named in a cell; the rest is counted."""


def on_file() -> Iterator[tuple[str, Facts]]:
    """Name and facts of every patient and of every recording."""
    for patient in patients():
        yield patient.name, examined(patient).facts
    for folder in RECORDED:
        for path in files(folder):
            yield name_of(path), read_saved(path)[0]


def machines() -> Iterator[tuple[str, Facts]]:
    """Name and facts of machines that are not here."""
    capped = nvml.h100(nvmlDeviceGetPowerManagementLimit=200_000)
    for name, device in (("an A100", nvml.a100()), ("an H100", nvml.h100()), ("an H100 at 200 W", capped)):
        yield f"{name} (stand-in)", machine(device)
    for name, precision in (("Accelerate on an A100", None), ("Accelerate in BF16 on an A100", "bf16")):
        with accelerator(precision, nvml.a100()):
            yield f"{name} (stand-in)", machine(nvml.a100())


def jobs_of_tests() -> Iterator[tuple[str, Facts]]:
    """Name and facts of jobs that the tests of the checks build."""
    from torch import nn

    from research.versions.test_training_bugs import Operation
    from research.zoo.test_experts import with_wrapped_experts
    from tests.checks.checkpointing.test_recompute_not_fp8 import Around
    from tests.checks.engagement.test_parameters_without_optimizer import built, mxfp8
    from tests.checks.environment.test_incompatible_versions import with_releases
    from tests.checks.shapes.test_unaligned_dimensions import counted
    from tests.checks.step.test_weights_cast_again import telling

    yield "the experts of a Llama 4, wrapped by torchao", look(with_wrapped_experts("Llama 4"))
    yield "MXFP8 Linears without a bias, on a CPU", look(mxfp8(built(False, False)))
    yield "one row a sample, counted on a CPU", counted(samples=4)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("FP8_BACKEND", "ACCELERATE_FP8_BACKEND"):
            patch.setenv(name, "AO")
        yield (
            "a setting of LLaMA-Factory's under Accelerate's name too",
            look(nn.Sequential(nn.Linear(64, 64))),
        )
    with pytest.MonkeyPatch.context() as patch:
        transformer_engine.install(patch, "fp8")
        yield (
            "te.Linear, recomputed inside its autocast (stand-in)",
            look(Around(inside=True, reentrant=False)),
        )
        for always in (True, False):
            told = telling(patch, always).facts
            yield f"is_first_microbatch, always {always} (stand-in)", told
        frozen = nn.Sequential(Operation().requires_grad_(False), Operation())
        yield "a frozen first te.ops layer (stand-in)", with_releases(look(frozen), transformer_engine="2.6")


def machine(device: nvml.Device) -> Facts:
    """A converted model on a machine with this GPU and a torch that can use it."""
    import torch
    from torch import nn
    from torchao.float8 import convert_to_float8_training

    model = convert_to_float8_training(nn.Sequential(nn.Linear(64, 64)).bfloat16())
    with pytest.MonkeyPatch.context() as patch:
        nvml.StandIn(device).install(patch)
        patch.setattr(torch.version, "cuda", "13.0")
        return look(model)


def look(model: Any) -> Facts:
    """Facts of a live model without a batch."""
    from fp8doctor.examine import examine
    from fp8doctor.loading.job import Job

    target = Target(kind="live", name=type(model).__name__, attribute=None)
    return examine(
        Job(model=model, target=target, workload=Workload(batch_source=None, tokens=None, accumulate=1))
    )


def matrix() -> tuple[list[tuple[str, str, str]], bool]:
    """The rows, and whether every cell is filled."""
    checks = registry.discover()
    seen: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, facts in (*on_file(), *machines(), *jobs_of_tests()):
        for check in checks:
            ((outcome,),) = registry.run([check], facts)[1:]
            seen[check.name, outcome.outcome].append(name)
    rows, complete = [], True
    for check in checks:
        healthy = seen[check.name, "silent"]
        if not healthy and check.severity == "info":
            # What is only told may have no healthy answer: with a GPU the question does not arise.
            healthy = seen[check.name, "not_applicable"]
        cells = {"fires": seen[check.name, "fires"], "silent": healthy}
        rows.append(
            (
                f"{check.code} {check.name}",
                *(cell(names) if names else "**missing**" for names in cells.values()),
            )
        )
        complete = complete and all(cells.values())
    return rows, complete


def empty() -> set[tuple[str, str]]:
    """Find the cells that no object fills, asking each rule until both of its cells are filled."""
    checks = registry.discover()
    left = {(check.name, state) for check in checks for state in ("fires", "silent")}
    for _, facts in chain(on_file(), machines(), jobs_of_tests()):
        for check in [each for each in checks if left & {(each.name, "fires"), (each.name, "silent")}]:
            ((outcome,),) = registry.run([check], facts)[1:]
            left.discard((check.name, outcome.outcome))
            if check.severity == "info" and outcome.outcome == "not_applicable":
                left.discard((check.name, "silent"))
    return left


def cell(names: list[str]) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return ", ".join(names[:NAMES_SHOWN]) + more


def main() -> int:
    rows, complete = matrix()
    print(tabulate(rows, headers=("check", "fires", "silent"), tablefmt="github"))
    return 0 if complete else 1


if __name__ == "__main__":
    sys.exit(main())
