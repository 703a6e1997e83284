"""The first line of a report: the GPU, the versions that matter, the model and its batch."""

from __future__ import annotations

from collections import Counter

from fp8doctor.facts import Facts, Gpu, Workload, recorded
from fp8doctor.wording import plural

SHOWN_PACKAGES = {"torchao": "torchao", "transformer_engine": "TE"}
"""Packages that are named where they are installed: import name -> what people call it."""

SXM = ("A100", "H100", "H200")
"""GPUs whose datasheet row in `fp8doctor.cost` is the SXM board, which is faster than the PCIe one of the
same name."""


def machine(facts: Facts, modelled_gpu: str) -> tuple[str, ...]:
    """The GPU and the versions that matter."""
    return (_gpu(facts, product(modelled_gpu)), *_versions(facts))


def _gpu(facts: Facts, modelled: str) -> str:
    if not recorded(facts.gpus):
        return f"GPU unknown; costs modelled for {modelled}"
    visible = [gpu for gpu in facts.gpus if gpu.visible is not False]
    if not visible:
        hidden = f"{plural(len(facts.gpus), 'GPU')} hidden from this process" if facts.gpus else "no GPU"
        return f"{hidden}; costs modelled for {modelled}"
    labels = Counter(_label(gpu) for gpu in visible)
    names = " + ".join(f"{count} x {label}" if count > 1 else label for label, count in labels.items())
    return f"{names}; costs modelled for {modelled}" if facts.assumed_gpu else names


def _label(gpu: Gpu) -> str:
    name = gpu.name if recorded(gpu.name) else "GPU"
    capability = gpu.compute_capability or gpu.architecture
    return f"{name}, {capability}" if capability else name


def product(gpu: str) -> str:
    """A GPU of the datasheet table as its maker sells it."""
    return f"{gpu} SXM" if gpu in SXM else gpu


def _versions(facts: Facts) -> tuple[str, ...]:
    software = facts.software
    if not recorded(software):
        return ("torch unknown",)
    torch = (
        f"torch {short_version(software.torch)}"
        if software.torch
        else "torch missing"
        if software.torch is None
        else "torch unknown"
    )
    packages = software.packages if recorded(software.packages) else {}
    stacks = (
        f"{label} {short_version(packages[name].version or '')}".rstrip()
        for name, label in SHOWN_PACKAGES.items()
        if name in packages
    )
    return (torch, *stacks)


def short_version(version: str) -> str:
    """A version as one says it: 2.11.0+cu130 is 2.11; a CPU build stays visible."""
    release, _, build = version.partition("+")
    return release.removesuffix(".0") + ("+cpu" if build == "cpu" else "")


def model(facts: Facts) -> str:
    """The model, its size and its batch; empty when only the environment was looked at."""
    target = facts.target
    if not recorded(target) or target.kind == "environment":
        return ""
    name = target.name if recorded(target.name) and target.name else "model"
    parameters = facts.network.parameters if recorded(facts.network) else None
    known = [f"{quantity(parameters)} parameters"] if recorded(parameters) and parameters is not None else []
    known += [_batch(facts.workload)] if recorded(facts.workload) else []
    return f"{name}: {', '.join(known)}" if known else name


def _batch(workload: Workload) -> str:
    size, length, tokens = (
        value if recorded(value) else None
        for value in (workload.batch_size, workload.sequence_length, workload.tokens)
    )
    if size and length:
        text = f"{size} x {length} tokens"
    elif tokens:
        text = f"{tokens} rows"
    else:
        return "batch unknown"
    return f"{text} (made up)" if workload.batch_source == "made up" else text


def quantity(count: int) -> str:
    """A count as one says it: 468.1 M, 8.03 B."""
    for factor, unit, digits in ((10**9, "B", 2), (10**6, "M", 1), (10**3, "k", 1)):
        if count >= 0.99995 * factor:
            return f"{count / factor:.{digits}f} {unit}"
    return str(count)
