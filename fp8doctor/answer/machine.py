"""The machine: whether it can train in FP8, a line for each thing that decides, versions for support."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from fp8doctor.analysis.recipe_support import (
    BACKENDS,
    has_fp8,
    runs_on,
    transformer_engine_line,
    usable_recipes,
)
from fp8doctor.answer.items import Mark
from fp8doctor.answer.job import gpu_label, short_version
from fp8doctor.diagnosis.document import Document
from fp8doctor.facts import Facts, Gpu, if_recorded, recorded
from fp8doctor.finding import Finding
from fp8doctor.recipes import RECIPES, Recipe
from fp8doctor.wording import plural

LIBRARIES = {
    "torchao": "torchao",
    "transformer_engine": "Transformer Engine",
    "accelerate": "accelerate",
    "transformers": "transformers",
    "deepspeed": "DeepSpeed",
    "unsloth": "Unsloth",
}
"""Libraries that the list always names: import name -> what people call it. Two of them train in FP8."""

FP8_LIBRARIES = ("torchao", "transformer_engine")

ABSENT = "not installed"

INSTALL = "pip install torchao"

NO_TENSOR_CORES = "no-fp8-tensor-cores"

SCALINGS = {"tensor": "tensorwise", "row": "rowwise"}
"""Granularity of a recipe -> what people call it; block scaling has several names."""


class Thing(Struct, frozen=True):
    """A line of the list, and what to type if it is bad."""

    mark: Mark
    name: str
    text: str
    lines: str = ""


ELSEWHERE = "fp8doctor model.py --assume-gpu H200"
"""Estimates for a GPU of another machine."""

WITH_CUDA = "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu130"
"""Puts a torch that uses the GPU in the place of one that does not."""


def no_model(report: Document) -> bool:
    """Return whether the report is of the machine alone, without a severe finding."""
    facts = report.facts
    environment = facts.get("target.kind") == "environment"
    return environment and not recorded(facts, "network")


def says(report: Document) -> tuple[Mark, str]:
    """Answer whether the machine can train in FP8, in one line."""
    facts = report.facts
    bad = sum(each.severity in ("warning", "error") for each in report.findings)
    bad += sum(each.mark == "bad" for each in _accelerate_config(facts))
    gpus, recipes = _visible(facts), if_recorded(usable_recipes, facts)
    issues = f"; {plural(bad, 'issue')} below" if bad else ""
    if gpus is None:
        return "unknown", f"fp8doctor cannot tell whether this machine can train in FP8{issues}"
    if not gpus:
        return "warning", f"No GPU here: FP8 cannot be timed on this machine{issues}"
    lacks = (
        (not any(map(has_fp8, gpus)), "no GPU with FP8 tensor cores"),
        (facts.get("software.torch", "unknown") is None, "this Python has no torch"),
        (_is_cpu_build(facts), "torch is built without CUDA"),
        (not _has_library(facts), "no FP8 library is installed"),
        (recipes == {}, "no FP8 library works here"),
    )
    for holds, why in lacks:
        if holds:
            return "bad", f"This machine cannot train in FP8: {why}{issues}"
    mark: Mark = "warning" if bad else "healthy"
    return mark, f"This machine can train in FP8{_by_library(facts, recipes or {})}{issues}"


def _by_library(facts: Facts, recipes: dict[str, list[Recipe]]) -> str:
    """Name the recipes of each installed library, behind "can train in FP8"."""
    packages = facts.packages()
    parts = [
        f"{', '.join(each.words or each.name for each in found)} "
        f"({LIBRARIES[stack]} {short_version(packages[stack].get('version') or 'of unknown version')})"
        for stack, found in recipes.items()
    ]
    return f" with {' and '.join(parts)}" if parts else ""


def things(report: Document, *, quiet: bool = False) -> Iterator[Thing]:
    """List the machine from the ground up; with ``quiet`` only what is bad."""
    facts = report.facts
    lines = [
        *_software(facts),
        *_gpus(report),
        *_packages(facts),
        *_accelerate_config(facts),
        *_settings(report),
    ]
    yield from (each for each in lines if not quiet or each.mark in ("bad", "warning"))


def _software(facts: Facts) -> Iterator[Thing]:
    if not recorded(facts, "software"):
        yield Thing("unknown", "Python", "packages were not read")
        return
    software = facts.software
    if recorded(software, "python"):
        on = f" on {software.platform}" if recorded(software, "platform") else ""
        yield Thing("healthy", "Python", f"{software.python}{on}")
    if (torch := software.get("torch")) is None:
        yield Thing("bad", "torch", ABSENT, "pip install torch")
        return
    version = torch.partition("+")[0]
    cuda = software.get("cuda")
    hip = software.get("hip")
    built = f"CUDA {cuda}" if cuda else f"ROCm {hip}" if hip else "built without CUDA"
    known = recorded(software, "cuda") or recorded(software, "hip")
    unused = _is_cpu_build(facts) and bool(facts.get("gpus"))
    mark: Mark = "bad" if unused else "info" if _is_cpu_build(facts) else "healthy"
    told = f"{version}, {built}" if known else short_version(torch)
    yield Thing(mark, "torch", told, WITH_CUDA if unused else "")
    if recorded(software, "driver") and not hip:
        driver = software.driver
        yield Thing("healthy" if driver else "not_applicable", "driver", driver or "no NVIDIA driver found")


def _gpus(report: Document) -> Iterator[Thing]:
    facts = report.facts
    gpus = _visible(facts)
    findings = [each for each in report.findings if each.area == "device"]
    if gpus is None:
        gaps = facts.get("gaps", {})
        yield Thing("unknown", "GPU", gaps.get("gpus", "unknown"), "nvidia-smi -L")
    elif gpus:
        for label, gpu in {gpu_label(each): each for each in gpus}.items():
            count = sum(gpu_label(each) == label for each in gpus)
            fp8 = has_fp8(gpu)
            scalings = (if_recorded(_scalings, facts, gpu) or "FP8") if fp8 else "no FP8 tensor cores"
            many = f"{count} x " if count > 1 else ""
            yield Thing(
                "healthy" if fp8 else "bad", "GPU", f"{many}{label}: {scalings}", "" if fp8 else ELSEWHERE
            )
    elif not findings:
        hidden = len(facts.get("gpus", ()))
        yield Thing("warning", "GPU", f"{hidden} hidden from this process" if hidden else "none", ELSEWHERE)
    for each in findings:
        if each.name != NO_TENSOR_CORES or each.treatment:  # else the GPU's line says it
            yield _of_finding("GPU", each, least="info" if gpus and not _is_cpu_build(facts) else "warning")


def _scalings(facts: Facts, gpu: Gpu) -> str:
    """Name the ways of scaling that a GPU supports, in whatever library."""
    names = [
        SCALINGS.get(each.granularity, each.words)
        for each in RECIPES.values()
        if each.granularity and gpu in runs_on(facts, each)
    ]
    return f"FP8 {', '.join(dict.fromkeys(names))}"


def _packages(facts: Facts) -> Iterator[Thing]:
    """List the libraries that train in FP8, or their absence, and others in a line."""
    if not recorded(facts, "software.packages"):
        return
    versions = {
        name: package.get("version") or "of unknown version" for name, package in facts.packages().items()
    }
    lacks = not if_recorded(usable_recipes, facts)
    for name, called in LIBRARIES.items():
        if name in versions and _runs_nothing(facts, name):
            text = f"{versions[name]}: none of its FP8 recipes runs here"
            upgrade = f"{INSTALL} --upgrade" if name == "torchao" else transformer_engine_line(facts)
            yield Thing("bad" if lacks else "warning", called, text, upgrade)
        elif name in versions:
            yield Thing("healthy", called, versions[name])
        elif not _has_library(facts) and name == "torchao":
            yield Thing("bad", called, f"{ABSENT}, and no other FP8 library", INSTALL)
        else:
            yield Thing("not_applicable", called, ABSENT)
    others = [
        f"{name} {version}"
        for name, version in versions.items()
        if name not in LIBRARIES and not name.startswith("transformer_engine_")
    ]
    if others:
        yield Thing("healthy", "others", " · ".join(others))


def _runs_nothing(facts: Facts, library: str) -> bool:
    """Return whether a GPU has FP8, and an FP8 library has no recipe for it."""
    if library not in FP8_LIBRARIES or _is_cpu_build(facts) or not any(map(has_fp8, _visible(facts) or ())):
        return False
    recipes = if_recorded(usable_recipes, facts)
    return recipes is not None and library not in recipes


def _accelerate_config(facts: Facts) -> Iterator[Thing]:
    """Tell what ``accelerate launch`` reads if no file is named."""
    path, name = "environment.accelerate_config", "Accelerate config"
    if not recorded(facts, path):
        if reason := facts.get("gaps", {}).get(path):
            yield Thing("unknown", name, reason, "accelerate config   # writes the file again")
        return
    config = facts.environment.accelerate_config
    if config is None:
        yield Thing("not_applicable", name, "no default file")
        return
    backend = f", FP8 backend {config.fp8_backend}" if config.fp8_backend else ""
    text = f"mixed_precision {config.mixed_precision}{backend}"
    stack = BACKENDS.get(config.fp8_backend or "")
    if config.mixed_precision != "fp8":
        yield Thing("info", name, text)
    elif stack and recorded(facts, "software.packages") and stack not in facts.packages():
        install = INSTALL if stack == "torchao" else transformer_engine_line(facts)
        yield Thing("bad", name, f"{text}, which is {ABSENT}", install)
    else:
        yield Thing("healthy", name, text)


def _settings(report: Document) -> Iterator[Thing]:
    """List the variables that are set, and the checks' findings on them and packages."""
    if recorded(report.facts, "environment.variables"):
        found = variables(report.facts)
        yield Thing("info" if found else "healthy", "variables", " · ".join(found) or "none that affects FP8")
    for each in report.findings:
        if each.area != "device":
            yield _of_finding(each.code, each)
    for outcome in report.outcomes:
        if outcome.outcome == "crashed":
            reason = outcome.reason or "no reason given"
            yield Thing("unknown", outcome.code, f"the check crashed: {reason}")


def _of_finding(name: str, finding: Finding, least: Mark = "info") -> Thing:
    marks: dict[str, Mark] = {"error": "bad", "warning": "warning"}
    change = finding.treatment
    code = "" if name == finding.code else f" ({finding.code})"
    return Thing(
        marks.get(finding.severity or "info", least),
        name,
        f"{finding.title.rstrip('.')}{code}",
        change.code if change else "",
    )


def _visible(facts: Facts) -> list[Gpu] | None:
    """List the GPUs that this process may use; None if they could not be read."""
    if not recorded(facts, "gpus"):
        return None
    return [gpu for gpu in facts.gpus if gpu.get("visible", True)]


def _is_cpu_build(facts: Facts) -> bool:
    return all(facts.get(f"software.{each}", "unknown") is None for each in ("cuda", "hip"))


def _has_library(facts: Facts) -> bool:
    return not recorded(facts, "software.packages") or any(name in facts.packages() for name in FP8_LIBRARIES)


SOFTWARE = {
    "python": "Python",
    "platform": "",
    "driver": "driver",
    "cublaslt": "cuBLASLt",
    "cudnn": "cuDNN",
    "triton": "Triton",
}
"""Fields of the software -> their names for people."""


def support(facts: Facts) -> tuple[str, ...]:
    """Tell what a maintainer asks for first, in a few words each."""
    software, health = facts.get("software"), facts.get("trial.health")
    told = [
        f"{label} {software.get(name)}".lstrip()
        for name, label in SOFTWARE.items()
        if software is not None and software.get(name) is not None
    ]
    clocks = ((gpu.get("sm_clock_mhz"), gpu.get("sm_clock_max_mhz")) for gpu in facts.get("gpus", ()))
    told += [f"SM clock {now} of {most} MHz" for now, most in clocks if now and most]
    clocks_seen = ("sm_clock_low_mhz", "sm_clock_high_mhz", "samples")
    low, high, looks = (health.get(name) if health else None for name in clocks_seen)
    if low and high and looks:
        told.append(f"{low} to {high} MHz in {plural(looks, 'look')} while timed")
    if harm := facts.get("trial.harm"):
        told.append(f"not as before the trial: {', '.join(harm)}")
    counts = {"training.distributed.world_size": "rank", "network.modules": "module", "network.hooks": "hook"}
    told += [plural(count, noun) for path, noun in counts.items() if (count := facts.get(path))]
    taken, frames = (facts.get(f"training.dynamo.{name}") for name in ("frames_ok", "frames_total"))
    if taken is not None and frames:
        told.append(f"Dynamo compiled {taken} of {plural(frames, 'frame')}")
    return tuple(told)


def variables(facts: Facts) -> tuple[str, ...]:
    """List the recorded environment variables as a shell would show them."""
    return tuple(f"{name}={value}" for name, value in facts.variables().items())


def untimed_shapes(facts: Facts) -> tuple[str, ...]:
    """List shapes that FP8 or its casts could not be timed for, one sentence each."""
    shapes = facts.get("trial.shapes", ())
    return tuple(
        f"Not timed alone: {each.m} x {each.k} x {each.n} {each.recipe}: {each.reason}"
        for each in shapes
        if each.get("reason")
    )
