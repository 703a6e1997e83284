"""The machine: whether it can train in FP8, a line for each thing that decides, versions for support."""

from __future__ import annotations

from collections.abc import Iterator

from fp8doctor.analysis.recipe_support import (
    has_fp8,
    transformer_engine_line,
    usable_recipes,
    visible_gpus,
)
from fp8doctor.answer.items import MARK_OF_SEVERITY, Mark, Marked
from fp8doctor.answer.job import gpu_label, short_version
from fp8doctor.diagnosis.document import Document
from fp8doctor.facts import Facts, if_recorded, recorded
from fp8doctor.finding import Finding
from fp8doctor.recipes import STACKS
from fp8doctor.wording import plural

FP8_LIBRARIES = ("torchao", "transformer_engine")

ABSENT = "not installed"

INSTALL = "pip install torchao"

ELSEWHERE = "fp8doctor model.py --assume-gpu H200"
"""Estimates for a GPU of another machine."""

WITH_CUDA = "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu130"
"""Puts a torch that uses the GPU in the place of one that does not."""


def no_model(report: Document) -> bool:
    """Return whether the report is of the machine alone."""
    return report.facts.get("target.kind") == "environment" and not recorded(report.facts, "network")


def says(report: Document) -> tuple[Mark, str]:
    """Answer whether the machine can train in FP8, in one line."""
    facts = report.facts
    bad = sum(each.severity in ("warning", "error") for each in report.findings)
    gpus, recipes = visible_gpus(facts), if_recorded(usable_recipes, facts)
    issues = f"; {plural(bad, 'issue')} below" if bad else ""
    if gpus is None:
        return "unknown", f"fp8doctor cannot tell whether this machine can train in FP8{issues}"
    if not gpus:
        return "warning", f"No GPU here: FP8 cannot be timed on this machine{issues}"
    lacks = {
        "no GPU with FP8 tensor cores": not any(map(has_fp8, gpus)),
        "this Python has no torch": facts.get("software.torch", "unknown") is None,
        "torch is built without CUDA": _is_cpu_build(facts),
        "no FP8 library is installed": not _has_library(facts),
        "no FP8 library works here": recipes == {},
    }
    if why := next((why for why, holds in lacks.items() if holds), None):
        return "bad", f"This machine cannot train in FP8: {why}{issues}"
    by_library = [
        f"{', '.join(each.words or each.name for each in found)} "
        f"({STACKS[stack].in_words} {short_version(facts.packages()[stack].get('version') or '?')})"
        for stack, found in (recipes or {}).items()
    ]
    how = f" with {' and '.join(by_library)}" if by_library else ""
    return "warning" if bad else "healthy", f"This machine can train in FP8{how}{issues}"


def things(report: Document, *, quiet: bool = False) -> Iterator[Marked]:
    """List the machine from the ground up; with ``quiet`` only what is bad."""
    facts = report.facts
    for of in (
        _software(facts),
        _gpus(report),
        _packages(facts),
        _settings(report),
    ):
        yield from (each for each in of if not quiet or each.mark in ("bad", "warning"))


def _software(facts: Facts) -> Iterator[Marked]:
    if not recorded(facts, "software"):
        yield Marked("unknown", "packages were not read", "Python")
        return
    software = facts.software
    if recorded(software, "python"):
        on = f" on {software.platform}" if recorded(software, "platform") else ""
        yield Marked("healthy", f"{software.python}{on}", "Python")
    if (torch := software.get("torch")) is None:
        yield Marked("bad", ABSENT, "torch", lines="pip install torch")
        return
    cuda, hip, of_cpu = software.get("cuda"), software.get("hip"), _is_cpu_build(facts)
    built = f", CUDA {cuda}" if cuda else f", ROCm {hip}" if hip else ", built without CUDA" * of_cpu
    unused = of_cpu and bool(facts.get("gpus"))
    mark: Mark = "bad" if unused else "info" if of_cpu else "healthy"
    yield Marked(mark, torch.partition("+")[0] + built, "torch", lines=WITH_CUDA if unused else "")
    if recorded(software, "driver") and not hip:
        driver = software.driver
        yield Marked("healthy" if driver else "not_applicable", driver or "no NVIDIA driver found", "driver")


def _gpus(report: Document) -> Iterator[Marked]:
    facts, gpus = report.facts, visible_gpus(report.facts)
    findings = [each for each in report.findings if each.area == "device"]
    if gpus is None:
        yield Marked("unknown", facts.get("gaps", {}).get("gpus", "unknown"), "GPU", lines="nvidia-smi -L")
    elif not gpus and not findings:
        hidden = len(facts.get("gpus", ()))
        yield Marked(
            "warning", f"{hidden} hidden from this process" if hidden else "none", "GPU", lines=ELSEWHERE
        )
    for label, gpu in {gpu_label(each): each for each in gpus or ()}.items():
        count = sum(gpu_label(each) == label for each in gpus or ())
        many = f"{count} x " if count > 1 else ""
        if has_fp8(gpu):
            yield Marked("healthy", f"{many}{label}: FP8", "GPU")
        else:
            yield Marked("bad", f"{many}{label}: no FP8 tensor cores", "GPU", lines=ELSEWHERE)
    for each in findings:
        if each.name != "no-fp8-tensor-cores" or each.treatment:  # else the GPU's line says it
            yield _of_finding("GPU", each, least="info" if gpus and not _is_cpu_build(facts) else "warning")


def _packages(facts: Facts) -> Iterator[Marked]:
    """List the libraries that train in FP8, and the others in a line."""
    if not recorded(facts, "software.packages"):
        return
    versions = {name: each.get("version") or "of unknown version" for name, each in facts.packages().items()}
    recipes, can_run = if_recorded(usable_recipes, facts), any(map(has_fp8, visible_gpus(facts) or ()))
    for name in FP8_LIBRARIES:
        words, version = STACKS[name].in_words, versions.pop(name, None)
        if version is None:
            continue
        if can_run and not _is_cpu_build(facts) and recipes is not None and name not in recipes:
            upgrade = f"{INSTALL} --upgrade" if name == "torchao" else transformer_engine_line(facts)
            text = f"{version}: none of its FP8 recipes runs here"
            yield Marked("warning" if recipes else "bad", text, words, lines=upgrade)
        else:
            yield Marked("healthy", version, words)
    if not _has_library(facts):
        yield Marked("bad", f"{ABSENT}, and no other FP8 library", "torchao", lines=INSTALL)
    others = [f"{name} {version}" for name, version in versions.items() if "transformer_engine" not in name]
    if others:
        yield Marked("healthy", " · ".join(others), "packages")


def _settings(report: Document) -> Iterator[Marked]:
    """List the variables that are set, and the checks' findings on them and packages."""
    if recorded(report.facts, "environment.variables"):
        found = variables(report.facts)
        yield Marked(
            "info" if found else "healthy", " · ".join(found) or "none that affects FP8", "variables"
        )
    for each in report.findings:
        if each.area != "device":
            yield _of_finding(each.code, each)
    for outcome in report.outcomes:
        if outcome.outcome == "crashed":
            reason = outcome.reason or "no reason given"
            yield Marked("unknown", f"the check crashed: {reason}", outcome.code)


def _of_finding(name: str, finding: Finding, least: Mark = "info") -> Marked:
    code = "" if name == finding.code else f" ({finding.code})"
    lines = finding.treatment.code if finding.treatment else ""
    mark = MARK_OF_SEVERITY.get(finding.severity, least)
    return Marked(mark, f"{finding.title.rstrip('.')}{code}", name, lines=lines)


def _is_cpu_build(facts: Facts) -> bool:
    return all(facts.get(f"software.{each}", "unknown") is None for each in ("cuda", "hip"))


def _has_library(facts: Facts) -> bool:
    return not recorded(facts, "software.packages") or any(name in facts.packages() for name in FP8_LIBRARIES)


SUPPORT = {
    "software.python": "Python {}",
    "software.platform": "{}",
    "software.driver": "driver {}",
    "software.cublaslt": "cuBLASLt {}",
    "software.cudnn": "cuDNN {}",
    "software.triton": "Triton {}",
    "training.distributed.world_size": "ranks: {}",
    "network.modules": "modules: {:,}",
    "network.hooks": "hooks: {:,}",
    "training.dynamo.frames_ok": "frames that Dynamo compiled: {:,}",
}
"""Facts that a maintainer asks for first -> their words."""


def support(facts: Facts) -> tuple[str, ...]:
    told = [words.format(value) for path, words in SUPPORT.items() if (value := facts.get(path))]
    clocks = ((gpu.get("sm_clock_mhz"), gpu.get("sm_clock_max_mhz")) for gpu in facts.get("gpus", ()))
    told += [f"SM clock {now} of {most} MHz" for now, most in clocks if now and most]
    low, high = (facts.get(f"trial.health.sm_clock_{each}_mhz") for each in ("low", "high"))
    if low and high:
        told.append(f"{low} to {high} MHz while timed")
    if harm := facts.get("trial.harm"):
        told.append(f"not as before the trial: {', '.join(harm)}")
    return tuple(told)


def variables(facts: Facts) -> tuple[str, ...]:
    """List the recorded environment variables as a shell would show them."""
    return tuple(f"{name}={value}" for name, value in facts.variables().items())


def untimed_shapes(facts: Facts) -> tuple[str, ...]:
    """List shapes that FP8 or its casts could not be timed for, one sentence each."""
    return tuple(
        f"Not timed alone: {each.m} x {each.k} x {each.n} {each.recipe}: {each.reason}"
        for each in facts.get("trial.shapes", ())
        if each.get("reason")
    )
