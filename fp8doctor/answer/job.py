"""The job in words: GPU, versions, model, what decides about FP8, and synthetic parts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median

from fp8doctor.analysis.compile_coverage import recomputed
from fp8doctor.analysis.fp8_request import lacks_autocast
from fp8doctor.analysis.layers import flops_share_pct, main_rows, stores_fp8, tokens_of
from fp8doctor.analysis.memory import memory_row
from fp8doctor.analysis.modelled_speedup import may_be_compiled_by_unsloth
from fp8doctor.analysis.own_step import own_words, watched_job
from fp8doctor.analysis.recipe_support import visible_gpus
from fp8doctor.analysis.treatment_table import recipe_in_words
from fp8doctor.diagnosis.engagement import invalidates, why_fp8_does_not_run
from fp8doctor.facts import Facts, Gpu, Linear, if_recorded, recorded
from fp8doctor.finding import Finding
from fp8doctor.recipes import STACKS, low_precision
from fp8doctor.wording import percent, plural

SHOWN_PACKAGES = {"torchao": "torchao", "transformer_engine": "TE"}
"""Packages that are named if they are installed: import name -> what people call it."""

SXM = ("A100", "H100", "H200")
"""GPUs whose datasheet is that of the SXM board, which is faster than the PCIe one of the same name."""

UNKNOWN = "unknown"
"""Stands for a fact that was not recorded."""

WATCHED = ("script", "live")
"""Kinds of jobs whose steps are the user's own, with a batch of their own."""


def machine(facts: Facts, modelled_gpu: str) -> tuple[str, ...]:
    """Describe the GPU and the versions that matter."""
    if not recorded(facts, "software"):
        return _gpu(facts, product(modelled_gpu)), "torch unknown"
    torch, packages = facts.software.get("torch", UNKNOWN), facts.packages()
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
    if not gpus:
        hidden = f"{plural(len(facts.gpus), 'GPU')} hidden from this process" if facts.gpus else "no GPU"
        return hidden + elsewhere
    counts = Counter(map(gpu_label, gpus))
    names = " + ".join(f"{count} x {label}" if count > 1 else label for label, count in counts.items())
    if modelled:
        return names + elsewhere * bool(facts.get("assumed_gpu"))
    amd = all(gpu.get("vendor") == "amd" for gpu in gpus)
    return f"{names}; no {'estimates for AMD' if amd else 'datasheet, so no estimates'}"


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
    """Describe the model, its size and its batch; empty for the environment alone."""
    if not recorded(facts, "target") or facts.target.get("kind") == "environment":
        return ""
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
    elif _lacks_batch(facts):
        return "batch not looked at" if facts.get("target.kind") in WATCHED else "no synthetic batch"
    else:
        return "batch unknown"
    count = workload.get("accumulate", 1)
    passes = facts.get("observed.backwards") or count
    if count > 1:
        calls = f"{count} calls ({passes} micro-batch{'' if passes == 1 else 'es'})" if passes < count else ""
        text += f" in each of {calls or f'{count} micro-batches'}"
    return f"{text} (synthetic)" if workload.get("batch_source") == "made up" else text


def _lacks_batch(facts: Facts) -> bool:
    """Return whether the step has no batch, and why is known."""
    return facts.workload.get("batch_source", UNKNOWN) is None and bool(facts.workload.get("note"))


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
    of = plural(len(linears), "Linear")
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
        idle = (
            "does not run" if if_recorded(why_fp8_does_not_run, facts) else "" if seen else "no step finished"
        )
        where = f"{'set up ' * bool(idle)}in {len(fp8)} of {of}{f', not in {beside}' if beside else ''}"
        return f"{low}{by} {where}{f'; {idle}' if idle else ''}"
    if unknown := sum(each.use == "unknown" for each in linears):
        return f"FP8 by name in {unknown} of {of}"
    if stored := sum(map(stores_fp8, linears)):
        return f"FP8 weights in {stored} of {of}, no FP8 training"
    if not linears and "network.linears" in facts.get("gaps", {}):
        return UNKNOWN
    calls = network.get("fp8_calls", ())
    return f"no FP8 in {of}{f'; outside of them {calls[0]}' if calls else ''}"


def _called(linear: Linear) -> str:
    """Return what a layer is called in its block."""
    words = [part for part in linear.name.split(".") if not part.isdigit()] or [linear.name]
    return "adapters" if linear.get("adapter") == "adapter" else words[-1]


def _compiled(findings: Sequence[Finding], facts: Facts) -> str:
    """Count what is compiled, or what asks for it if a finding says that not all of it is."""
    blocks, linears = facts.blocks(), facts.linears()
    done, count, noun = sum(each.compiled is not None for each in linears), len(linears), "Linear"
    if blocks and all(recorded(each, "compiled") and recorded(each, "count") for each in blocks):
        whole = sum(each.compiled for each in blocks)
        if whole or not done:
            done, count, noun = whole, sum(each.count for each in blocks), "block"
    if not count or (not done and may_be_compiled_by_unsloth(facts)):
        return UNKNOWN
    doubts = (each for each in findings if each.area == "compilation" and invalidates(each))
    doubt = next(doubts, None) if done else None
    told = f"{done} of {plural(count, noun)}"
    return f"asked for in {told}, but see {doubt.code}" if doubt else told


def _checkpointing(facts: Facts) -> str:
    found = facts.training.checkpointing
    if any(each.active is True for each in found):
        lists = {each.name: if_recorded(recomputed, each, facts) for each in facts.blocks()}
        if any(lists.values()):
            blocks = plural(sum(each.count for each in facts.blocks() if lists[each.name]), "block")
            return f"on in {sum(each or 0 for each in lists.values())} of {blocks}"
        return "on"
    undecided = any(each.active is not False for each in found)
    return "possible (a forward calls checkpoint)" if undecided else "off"


def _lora(facts: Facts) -> str:
    network = facts.network
    if not network.adapter_parameters:
        return "none"
    flops = flops_share_pct((linear for linear in facts.linears() if linear.adapter == "adapter"), facts)
    shares = {"matmul FLOPs": flops}
    if network.get("parameters"):
        shares = {"parameters": 100.0 * network.adapter_parameters / network.parameters} | shares
    return ", ".join(f"{percent(share)} of {of}" for of, share in shares.items() if share) or "on"


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
    kernels = f"{' and '.join(fused)} kernel{'s' if len(fused) > 1 else ''}" if fused else ""
    unfused = "no fused kernel" if ran and not fused else ""
    none = "no attention found" if recorded(facts, "network.attentions") and not (asked or ran) else ""
    return ", ".join(filter(None, (*asked, kernels, unfused, none)))


def made_up(facts: Facts) -> str:
    """Name the step's synthetic parts, and what is missing; else empty."""
    if not recorded(facts, "workload"):
        return ""
    work, trainer = facts.workload, facts.trainer()
    synthetic = {
        "the batch": work.get("batch_source") == "made up",
        "the loss (the mean of the output)": work.get("loss_source") == "mean",
        "the optimizer (AdamW)": work.get("optimizer_source") == "made up",
    }
    told = []
    if parts := [name for name, holds in synthetic.items() if holds]:
        without = work.get("autocast_source") == "none" and lacks_autocast(facts)
        told.append(f"Synthetic: {', '.join(parts)}{'; no autocast' if without else ''}.")
    if _lacks_batch(facts) and facts.get("target.kind") not in WATCHED:
        why = (work.note or "").rstrip(".")
        told.append(f"{why[:1].upper()}{why[1:]}.")
    of_source = {"output.loss": "the model's own", "mean": "the mean of the output"}
    used = of_source.get(work.get("loss_source"))
    copied = not facts.get("observed.steps_ms") or recorded(facts, "trial.arms")
    if used and copied and trainer is not None and trainer.get("own_loss"):
        told.append(
            f"The loss is {used}; the Trainer's ({trainer.own_loss}) is not called: if it is another, "
            "give it as loss(output, batch) or training_step(model, batch)."
        )
    regions = facts.get("training.checkpointing")
    is_off = regions is not None and all(each.get("active") is False for each in regions)
    later = trainer is not None and trainer.get("checkpointing") is True
    if later and is_off and facts.get("target.kind") != "script":
        told.append("Without the checkpointing that train() turns on.")
    return " ".join(told)
