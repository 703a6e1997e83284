"""The job in words: GPU, versions, model, what decides about FP8, and synthetic parts; and the machine alone:
whether it can train in FP8, a line for each thing that decides, versions for support."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median

from fp8doctor.analysis.compile_coverage import recomputed
from fp8doctor.analysis.fp8_request import lacks_autocast
from fp8doctor.analysis.layers import flops_share_pct, main_rows, stores_fp8, tokens_of
from fp8doctor.analysis.memory import memory_row
from fp8doctor.analysis.modelled_speedup import may_be_compiled_by_unsloth
from fp8doctor.analysis.own_step import own_words, watched_job
from fp8doctor.analysis.recipe_support import has_fp8, transformer_engine_line, usable_recipes, visible_gpus
from fp8doctor.analysis.treatment_table import recipe_in_words
from fp8doctor.answer.items import MARK_OF_SEVERITY, Mark, Marked
from fp8doctor.answer.verdict import invalidates, why_fp8_does_not_run
from fp8doctor.diagnosis.document import Document
from fp8doctor.facts import Facts, Gpu, Linear, Software, if_recorded, recorded
from fp8doctor.finding import Finding
from fp8doctor.recipes import STACKS, low_precision
from fp8doctor.wording import part_of, percent, plural

SHOWN_PACKAGES = {"torchao": "torchao", "transformer_engine": "TE"}
"""Packages that are named if they are installed: import name -> what people call it."""

SXM = ("A100", "H100", "H200")
"""GPUs whose datasheet is that of the SXM board, which is faster than the PCIe one of the same name."""

UNKNOWN = "unknown"
"""Stands for a fact that was not recorded."""

WATCHED = ("script", "live")
"""Kinds of jobs whose steps are the user's own, with a batch of their own."""


def machine(facts: Facts, modelled_gpu: str) -> tuple[str, ...]:
    torch, packages = facts.get("software.torch", UNKNOWN), facts.packages()
    versions = {
        label: packages[name].get("version") for name, label in SHOWN_PACKAGES.items() if name in packages
    }
    named = {"torch": torch or "missing"} | versions
    told = (f"{label} {short_version(version or '')}".rstrip() for label, version in named.items())
    return _gpu(facts, product(modelled_gpu)), *told


def _gpu(facts: Facts, modelled: str) -> str:
    gpus, elsewhere = visible_gpus(facts), f"; estimates for {modelled}"
    if gpus is None:
        return f"GPU unknown{elsewhere}"
    counts = Counter(map(gpu_label, gpus))
    names = " + ".join(f"{count} x {label}" if count > 1 else label for label, count in counts.items())
    if modelled:
        return (names or "no visible GPU") + elsewhere * bool(facts.get("assumed_gpu") or not gpus)
    return f"{names}; no estimates"


def gpu_label(gpu: Gpu) -> str:
    capability = gpu.get("compute_capability") or gpu.get("architecture")
    return ", ".join(filter(None, (gpu.get("name", "GPU"), capability)))


def product(gpu: str) -> str:
    """Name a GPU of the datasheet table as its maker sells it."""
    return f"{gpu} SXM" if gpu in SXM else gpu


def short_version(version: str) -> str:
    """Write a version as one says it: 2.11.0+cu130 is 2.11; a CPU build stays visible."""
    release, _, build = version.partition("+")
    return release.removesuffix(".0") + ("+cpu" if build == "cpu" else "")


def model(facts: Facts) -> str:
    counted, steps = facts.get("network.parameters"), facts.get("observed.steps_ms")
    known = [f"{quantity(counted)} parameters"] if counted is not None else []
    known += [_batch(facts)] if recorded(facts, "workload") else []
    if steps:
        known.append(f"{median(steps):,.1f} ms/step in {plural(len(steps), 'step')} of {watched_job(facts)}")
    return ": ".join(filter(None, (facts.get("target.name") or "model", ", ".join(known))))


def _batch(facts: Facts) -> str:
    workload, rows = facts.workload, if_recorded(main_rows, facts)
    size, length, tokens = (workload.get(each) for each in ("batch_size", "sequence_length", "tokens"))
    if size and length and if_recorded(tokens_of, facts):
        text = f"{size} x {length} tokens"
        text += f", most FLOPs in {rows} rows" if rows not in (None, tokens) else ""
    elif rows or tokens or size:
        text = f"{rows or tokens} rows" if rows or tokens else f"a batch of {size}"
    else:
        return "batch unknown"
    if (count := workload.get("accumulate", 1)) > 1:
        text += f" in each of {count} calls"
    return f"{text} (synthetic)" if workload.get("batch_source") == "made up" else text


def quantity(count: int) -> str:
    """Write a count as one says it: 468.1 M, 8.03 B."""
    for factor, unit, digits in ((10**9, "B", 2), (10**6, "M", 1), (10**3, "k", 1)):
        if count >= 0.99995 * factor:
            return f"{count / factor:.{digits}f} {unit}"
    return str(count)


TOKENS, ROWS = "Tokens/s", "Rows/s"

MOST_NAMES = 3
"""Names of layers without FP8 that the heading tells."""


def job_facts(
    facts: Facts, tokens_per_s: float | None, findings: Sequence[Finding] = ()
) -> tuple[tuple[str, str], ...]:
    """Describe what decides about FP8, a label and a line for each; empty without a model."""
    if not recorded(facts, "network"):
        return ()
    rows: dict[str, Callable[[Facts], str]] = {
        "FP8": _fp8,
        "compiled": partial(_compiled, findings),
        "checkpointing": _checkpointing,
        "LoRA": _lora,
        "attention": _attention,
        "Memory": memory_row,
    }
    told = [(label, if_recorded(row, facts) or UNKNOWN) for label, row in rows.items()]
    if tokens_per_s:
        label = TOKENS if facts.get("workload.sequence_length") else ROWS
        told.append((label, f"{tokens_per_s:,.0f} {own_words(facts)}"))
    return tuple(told)


def _fp8(facts: Facts) -> str:
    """Tell how many layers train in FP8, by which library and recipe."""
    network, linears = facts.network, facts.network.linears
    of = partial(part_of, count=len(linears), noun="Linear")
    if fp8 := network.fp8:
        low = low_precision(fp8)
        stacks = dict.fromkeys(each.stack for each in fp8 if recorded(each, "stack"))
        recipes = dict.fromkeys(each.recipe for each in fp8 if recorded(each, "recipe"))
        how = [STACKS[each].in_words if each in STACKS else each for each in filter(None, stacks)]
        how += map(recipe_in_words, filter(None, recipes)) if low == "FP8" else []
        by = f" ({', '.join(how)})" if how else ""
        inside, named = set(map(id, fp8)), [each for each in linears if recorded(each, "name")]
        every = Counter(map(_called, named))
        out = Counter(_called(each) for each in named if id(each) not in inside)
        names = [
            name if count == every[name] else f"{count} of {every[name]} {name}"
            for name, count in out.items()
        ]
        beside = ", ".join(names[:MOST_NAMES]) + " ..." * (len(names) > MOST_NAMES)
        seen = facts.get("observed.steps_ms") or any(each.get("tried") for each in facts.arms())
        runs = seen and not if_recorded(why_fp8_does_not_run, facts)
        where = f"{'' if runs else 'set up '}in {of(len(fp8))}{f', not in {beside}' if beside else ''}"
        return f"{low}{by} {where}"
    if unknown := sum(each.use == "unknown" for each in linears):
        return f"FP8 of no known library in {of(unknown)}"
    if stored := sum(map(stores_fp8, linears)):
        return f"FP8 weights in {of(stored)}, no FP8 training"
    if not linears and "network.linears" in facts.get("gaps", {}):
        return UNKNOWN
    calls = network.get("fp8_calls", ())
    return f"no FP8 in {plural(len(linears), 'Linear')}{f'; outside of them {calls[0]}' if calls else ''}"


def _called(linear: Linear) -> str:
    """Return what a layer is called in its block."""
    words = [part for part in linear.name.split(".") if not part.isdigit()] or [linear.name]
    return "adapters" if linear.get("adapter") == "adapter" else words[-1]


def _compiled(findings: Sequence[Finding], facts: Facts) -> str:
    """Count what is compiled, or what asks for it if a finding says that not all of it is."""
    blocks, linears = facts.blocks(), facts.linears()
    done, count, noun = sum(each.compiled is not None for each in linears), len(linears), "Linear"
    if blocks:
        whole = sum(each.compiled for each in blocks)
        if whole or not done:
            done, count, noun = whole, sum(each.count for each in blocks), "block"
    if not done and may_be_compiled_by_unsloth(facts):
        return UNKNOWN
    doubts = (each for each in findings if each.area == "compilation" and invalidates(each))
    doubt = next(doubts, None) if done else None
    told = part_of(done, count, noun)
    return f"asked for in {told}, but see {doubt.code}" if doubt else told


def _checkpointing(facts: Facts) -> str:
    found, trainer = facts.training.checkpointing, facts.trainer()
    if any(each.active is True for each in found):
        counts = [(if_recorded(recomputed, each, facts), each.count) for each in facts.blocks()]
        told = [part_of(count, blocks, "block") for count, blocks in counts if count]
        return f"on in {' and '.join(told)}" if told else "on"
    if any(each.active is not False for each in found):
        return "possible (a forward calls checkpoint)"
    return "off until train()" if trainer and trainer.get("checkpointing") else "off"


def _lora(facts: Facts) -> str:
    network = facts.network
    if not network.adapter_parameters:
        return "none"
    flops = flops_share_pct((linear for linear in facts.linears() if linear.adapter == "adapter"), facts)
    shares = {"parameters": 100.0 * network.adapter_parameters / network.parameters, "matmul FLOPs": flops}
    return ", ".join(f"{percent(share)} of {of}" for of, share in shares.items() if share)


KERNELS = {"cudnn": "cuDNN", "flash": "flash", "efficient": "memory-efficient", "flex": "flex"}
"""Part of the operator or kernel of a fused attention -> its name for users; cuDNN's have both in theirs."""


def _attention(facts: Facts) -> str:
    """Name how attention is asked for, and the kernels that ran."""
    asked = dict.fromkeys(each.implementation for each in facts.network.get("attentions", ()))
    profiled = (each.get("breakdown") for each in facts.arms() if each.tried)
    groups = next((found.get("groups", ()) for found in profiled if found), ())
    ran = [
        f"{each.get('operator') or ''} {each.name}".lower() for each in groups if each.family == "attention"
    ]
    found = (next((words for part, words in KERNELS.items() if part in name), "") for name in ran)
    fused = sorted(set(filter(None, found)))
    kernels = f"{' and '.join(fused) or 'no fused'} kernel" if ran else ""
    none = "no attention found" if recorded(facts, "network.attentions") and not (asked or ran) else ""
    return ", ".join(filter(None, (*asked, kernels, none)))


def made_up(facts: Facts) -> str:
    """Name the step's synthetic parts, and what is missing; else empty."""
    if not recorded(facts, "workload"):
        return ""
    work = facts.workload
    synthetic = {
        "the batch": work.get("batch_source") == "made up",
        "the loss (the mean of the output)": work.get("loss_source") == "mean",
        "the optimizer (AdamW)": work.get("optimizer_source") == "made up",
    }
    told = []
    if parts := [name for name, holds in synthetic.items() if holds]:
        without = work.get("autocast_source") == "none" and lacks_autocast(facts)
        told.append(f"Synthetic: {', '.join(parts)}{'; no autocast' if without else ''}.")
    unseen = work.get("batch_source", UNKNOWN) is None and facts.get("target.kind") not in WATCHED
    if unseen and (why := (work.get("note") or "").rstrip(".")):
        told.append(f"{why[:1].upper()}{why[1:]}.")
    return " ".join(told)


ABSENT = "not installed"

INSTALL = "pip install torchao"

ELSEWHERE = "fp8doctor model.py --assume-gpu H200"
"""Estimates for a GPU of another machine."""

WITH_CUDA = "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu130"
"""Puts a torch that uses the GPU in the place of one that does not."""


def lacks_model(report: Document) -> bool:
    """Return whether the report is of the machine alone."""
    return report.facts.get("target.kind") == "environment" and not recorded(report.facts, "network")


def machine_says(report: Document) -> tuple[Mark, str]:
    """Answer whether the machine can train in FP8, in one line: the first bad thing keeps it from that."""
    facts, gpus = report.facts, visible_gpus(report.facts)
    bad = sum(each.severity in ("warning", "error") for each in report.findings)
    issues = f"; {plural(bad, 'issue')} below" if bad else ""
    if gpus is None:
        return "unknown", f"fp8doctor cannot tell whether this machine can train in FP8{issues}"
    if not gpus:
        return "warning", f"No GPU here: FP8 cannot be timed on this machine{issues}"
    if why := next((each for each in _machine_parts(facts) if each.mark == "bad"), None):
        return "bad", f"This machine cannot train in FP8: {why.name} {why.text}{issues}"
    return "warning" if bad else "healthy", f"This machine can train in FP8{issues}"


def machine_lines(report: Document, *, quiet: bool = False) -> Iterator[Marked]:
    """List the machine from the ground up, then the checks' findings; with ``quiet`` only what is bad."""
    facts = report.facts
    every = [*_machine_parts(facts), *_findings(report)]
    if recorded(facts, "environment.variables"):
        found = " · ".join(variables(facts))
        every.append(Marked("info" if found else "healthy", found or "none that affects FP8", "variables"))
    yield from (each for each in every if not quiet or each.mark in ("bad", "warning"))


def _machine_parts(facts: Facts) -> Iterator[Marked]:
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
    own = [name for name in SHOWN_PACKAGES if name in versions]
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
