"""The machine: whether it can train in FP8, a line for each thing that decides, versions for support."""

from collections import Counter
from collections.abc import Iterator

from fp8doctor.analysis.recipe_support import has_fp8, transformer_engine_line, usable_recipes, visible_gpus
from fp8doctor.answer.items import MARK_OF_SEVERITY, Mark, Marked
from fp8doctor.answer.job import gpu_label
from fp8doctor.diagnosis.document import Document
from fp8doctor.facts import Facts, Software, if_recorded, recorded
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
    """Answer whether the machine can train in FP8, in one line: the first bad thing keeps it from that."""
    facts, gpus = report.facts, visible_gpus(report.facts)
    bad = sum(each.severity in ("warning", "error") for each in report.findings)
    issues = f"; {plural(bad, 'issue')} below" if bad else ""
    if gpus is None:
        return "unknown", f"fp8doctor cannot tell whether this machine can train in FP8{issues}"
    if not gpus:
        return "warning", f"No GPU here: FP8 cannot be timed on this machine{issues}"
    if why := next((each for each in _parts(facts) if each.mark == "bad"), None):
        return "bad", f"This machine cannot train in FP8: {why.name} {why.text}{issues}"
    return "warning" if bad else "healthy", f"This machine can train in FP8{issues}"


def things(report: Document, *, quiet: bool = False) -> Iterator[Marked]:
    """List the machine from the ground up, then the checks' findings; with ``quiet`` only what is bad."""
    facts = report.facts
    every = [*_parts(facts), *_findings(report)]
    if recorded(facts, "environment.variables"):
        found = " · ".join(variables(facts))
        every.append(Marked("info" if found else "healthy", found or "none that affects FP8", "variables"))
    yield from (each for each in every if not quiet or each.mark in ("bad", "warning"))


def _parts(facts: Facts) -> Iterator[Marked]:
    """Describe Python, torch, driver, GPUs and libraries."""
    software = facts.get("software", Software())
    if recorded(software, "python"):
        on = f" on {software.platform}" if recorded(software, "platform") else ""
        yield Marked("healthy", f"{software.python}{on}", "Python")
    torch, built = software.get("torch", ""), [software.get(each, "unknown") for each in ("cuda", "hip")]
    of_cpu = not any(built)
    if torch is None:
        yield Marked("bad", ABSENT, "torch", lines="pip install torch")
    elif torch:
        cuda, hip = (each if each != "unknown" else None for each in built)
        how = f", CUDA {cuda}" if cuda else f", ROCm {hip}" if hip else ", built without CUDA" * of_cpu
        unused = of_cpu and bool(facts.get("gpus"))
        mark: Mark = "bad" if unused else "info" if of_cpu else "healthy"
        yield Marked(mark, torch.partition("+")[0] + how, "torch", lines=WITH_CUDA if unused else "")
    driver = software.get("driver", "")
    if (driver or driver is None) and not software.get("hip"):
        yield Marked("healthy" if driver else "not_applicable", driver or "no NVIDIA driver found", "driver")
    gpus = visible_gpus(facts)
    if gpus is None:
        yield Marked("unknown", facts.get("gaps", {}).get("gpus", "unknown"), "GPU", lines="nvidia-smi -L")
    elif not gpus:
        hidden = f"{len(facts.gpus)} hidden from this process" if facts.gpus else "none"
        yield Marked("warning", hidden, "GPU", lines=ELSEWHERE)
    can_run = {gpu_label(each) for each in gpus or () if has_fp8(each)}
    for label, count in Counter(map(gpu_label, gpus or ())).items():
        named, fp8 = f"{count} x {label}" if count > 1 else label, label in can_run
        least: Mark = "info" if can_run else "bad"
        words = "FP8" if fp8 else "no FP8 tensor cores"
        yield Marked("healthy" if fp8 else least, f"{named}: {words}", "GPU", lines="" if fp8 else ELSEWHERE)
    if recorded(software, "packages"):
        yield from _packages(facts, can_run=bool(can_run) and not of_cpu)


def _packages(facts: Facts, *, can_run: bool) -> Iterator[Marked]:
    """List the libraries that train in FP8, and the others in a line."""
    versions = {name: each.get("version") or "of unknown version" for name, each in facts.packages().items()}
    recipes = if_recorded(usable_recipes, facts) if can_run else None
    own = [name for name in FP8_LIBRARIES if name in versions]
    for name in own:
        version, words = versions.pop(name), STACKS[name].in_words
        if recipes is None or name in recipes:
            found = [each.words or each.name for each in (recipes or {}).get(name, ())]
            yield Marked("healthy", ": ".join(filter(None, (version, ", ".join(found)))), words)
            continue
        upgrade = f"{INSTALL} --upgrade" if name == "torchao" else transformer_engine_line(facts)
        mark: Mark = "warning" if recipes else "bad"
        yield Marked(mark, f"{version}: none of its FP8 recipes runs here", words, lines=upgrade)
    if not own:
        yield Marked("bad", f"{ABSENT}, and no other FP8 library", "torchao", lines=INSTALL)
    others = [f"{name} {version}" for name, version in versions.items() if "transformer_engine" not in name]
    if others:
        yield Marked("healthy", " · ".join(others), "packages")


def _findings(report: Document) -> Iterator[Marked]:
    """List the findings that no part's own line says."""
    for each in report.findings:
        if each.name != "no-fp8-tensor-cores" or each.treatment:
            change = each.treatment.code if each.treatment else ""
            mark = MARK_OF_SEVERITY.get(each.severity, "info")
            yield Marked(mark, each.title.rstrip("."), each.code, lines=change)


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
    low, high = (facts.get(f"trial.health.sm_clock_{each}_mhz") for each in ("low", "high"))
    if low and high:
        told.append(f"{low} to {high} MHz while timed")
    if harm := facts.get("trial.harm"):
        told.append(f"not as before the trial: {', '.join(harm)}")
    return tuple(told)


def variables(facts: Facts) -> tuple[str, ...]:
    """List the recorded environment variables as a shell would show them."""
    return tuple(f"{name}={value}" for name, value in facts.variables().items())
