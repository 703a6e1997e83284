"""The first line of a report: the GPU, the versions that matter, the model and its batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from statistics import median

from fp8doctor.analysis.layers import main_rows, stores_fp8
from fp8doctor.analysis.outcome import watched_job
from fp8doctor.analysis.variant_words import recipe_in_words
from fp8doctor.facts import Facts, Gpu, Linear, Package, Software, Workload, if_recorded, recorded
from fp8doctor.recipes import STACKS
from fp8doctor.wording import plural

SHOWN_PACKAGES = {"torchao": "torchao", "transformer_engine": "TE"}
"""Packages that are named where they are installed: import name -> what people call it."""

SXM = ("A100", "H100", "H200")
"""GPUs whose datasheet is that of the SXM board, which is faster than the PCIe one of the same name."""


def machine(facts: Facts, modelled_gpu: str) -> tuple[str, ...]:
    """Describe the GPU and the versions that matter."""
    return (_gpu(facts, product(modelled_gpu)), *_versions(facts))


def _gpu(facts: Facts, modelled: str) -> str:
    if not recorded(facts, "gpus"):
        return f"GPU unknown; costs modelled for {modelled}"
    visible = [gpu for gpu in facts.gpus if not recorded(gpu, "visible") or gpu.visible]
    if not visible:
        hidden = f"{plural(len(facts.gpus), 'GPU')} hidden from this process" if facts.gpus else "no GPU"
        return f"{hidden}; costs modelled for {modelled}"
    labels = Counter(gpu_label(gpu) for gpu in visible)
    names = " + ".join(f"{count} x {label}" if count > 1 else label for label, count in labels.items())
    if not modelled:
        amd = all(recorded(gpu, "vendor") and gpu.vendor == "amd" for gpu in visible)
        return f"{names}; no {'modelled costs for AMD' if amd else 'datasheet, so no modelled costs'}"
    assumed = recorded(facts, "assumed_gpu") and facts.assumed_gpu
    return f"{names}; costs modelled for {modelled}" if assumed else names


def fp8_share(facts: Facts) -> str:
    """Tell how many layers train in FP8, by which library and recipe."""
    linears = facts.network.linears
    in_fp8 = [linear for linear in linears if linear.use == "training"]
    stacks = [STACKS[each].words or each if each in STACKS else each for each in _names(in_fp8, "stack")]
    how = ", ".join((*stacks, *(recipe_in_words(each) for each in _names(in_fp8, "recipe"))))
    share = f"{len(in_fp8)} of {plural(len(linears), 'Linear')}"
    unknown = [linear for linear in linears if linear.use == "unknown"]
    if unknown and not in_fp8:
        return f"FP8 by name in {len(unknown)} of {plural(len(linears), 'Linear')}"
    if not linears and "network.linears" in (facts.gaps if recorded(facts, "gaps") else {}):
        return "its Linears could not be read"
    if stored := sum(map(stores_fp8, linears)) if not in_fp8 else 0:
        return f"FP8 weights in {stored} of {plural(len(linears), 'Linear')}, no FP8 training"
    if not in_fp8:
        return f"no FP8 in {plural(len(linears), 'Linear')}"
    return f"FP8 ({how}) in {share}" if how else f"FP8 in {share}"


def _names(linears: Iterable[Linear], field: str) -> list[str]:
    read = (getattr(each, field) for each in linears if recorded(each, field))
    return list(dict.fromkeys(filter(None, read)))


def gpu_label(gpu: Gpu) -> str:
    name = gpu.name if recorded(gpu, "name") else "GPU"
    capability = (gpu.compute_capability if recorded(gpu, "compute_capability") else None) or (
        gpu.architecture if recorded(gpu, "architecture") else None
    )
    return f"{name}, {capability}" if capability else name


def product(gpu: str) -> str:
    """Name a GPU of the datasheet table as its maker sells it."""
    return f"{gpu} SXM" if gpu in SXM else gpu


def _versions(facts: Facts) -> tuple[str, ...]:
    if not recorded(facts, "software"):
        return ("torch unknown",)
    packages = facts.packages()
    stacks = (
        f"{label} {short_version(_version(packages[name]))}".rstrip()
        for name, label in SHOWN_PACKAGES.items()
        if name in packages
    )
    return (_torch(facts.software), *stacks)


def _torch(software: Software) -> str:
    if not recorded(software, "torch"):
        return "torch unknown"
    return f"torch {short_version(software.torch)}" if software.torch else "torch missing"


def _version(package: Package) -> str:
    return (package.version if recorded(package, "version") else None) or ""


def short_version(version: str) -> str:
    """Write a version as one says it: 2.11.0+cu130 is 2.11; a CPU build stays visible."""
    release, _, build = version.partition("+")
    return release.removesuffix(".0") + ("+cpu" if build == "cpu" else "")


def model(facts: Facts) -> str:
    """Describe the model, its size and its batch; empty when only the environment was looked at."""
    if not recorded(facts, "target"):
        return ""
    target = facts.target
    if recorded(target, "kind") and target.kind == "environment":
        return ""
    name = target.name if recorded(target, "name") and target.name else "model"
    counted = recorded(facts, "network.parameters")
    known = [f"{quantity(facts.network.parameters)} parameters"] if counted else []
    known += [_batch(facts)] if recorded(facts, "workload") else []
    known += [step] if (step := if_recorded(_own_step, facts)) else []
    return f"{name}: {', '.join(known)}" if known else name


def _own_step(facts: Facts) -> str:
    """The step of the user's script or training, as it ran."""
    steps = facts.observed.steps_ms
    return f"{median(steps):,.1f} ms a step in {plural(len(steps), 'step')} of {watched_job(facts)}"


def _batch(facts: Facts) -> str:
    workload, rows = facts.workload, if_recorded(main_rows, facts)
    size = workload.batch_size if recorded(workload, "batch_size") else None
    length = workload.sequence_length if recorded(workload, "sequence_length") else None
    tokens = workload.tokens if recorded(workload, "tokens") else None
    if size and length:
        text = f"{size} x {length} tokens"
        if rows not in (None, tokens):
            text += f", {rows} rows in most layers"
    elif rows or tokens:
        text = f"{rows or tokens} rows"
    elif size:
        text = f"a batch of {size}"
    else:
        why = "batch not looked at" if steps_are_watched(facts) else "no batch made up"
        return why if lacks_batch(workload) else "batch unknown"
    count = workload.accumulate if recorded(workload, "accumulate") else 1
    if count > 1:
        text += f" in each of {count} micro-batches"
    made_up = recorded(workload, "batch_source") and workload.batch_source == "made up"
    return f"{text} (made up)" if made_up else text


def steps_are_watched(facts: Facts) -> bool:
    """Whether the steps are the user's own, whose batch nobody makes up."""
    return recorded(facts, "target.kind") and facts.target.kind in ("script", "live")


def lacks_batch(workload: Workload) -> bool:
    """Whether the step has no batch, and why is known."""
    known = recorded(workload, "note") and recorded(workload, "batch_source")
    return known and workload.batch_source is None and bool(workload.note)


def quantity(count: int) -> str:
    """Write a count as one says it: 468.1 M, 8.03 B."""
    for factor, unit, digits in ((10**9, "B", 2), (10**6, "M", 1), (10**3, "k", 1)):
        if count >= 0.99995 * factor:
            return f"{count / factor:.{digits}f} {unit}"
    return str(count)
