"""The job in words: GPU, versions, model, what decides about FP8, its ranks, and synthetic parts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import median

from fp8doctor.analysis.fp8_request import lacks_autocast
from fp8doctor.analysis.layers import flops_share_pct, main_rows, stores_fp8
from fp8doctor.analysis.memory import memory_row
from fp8doctor.analysis.modelled_speedup import may_be_compiled_by_unsloth
from fp8doctor.analysis.own_step import own_words, watched_job
from fp8doctor.analysis.treatment_table import recipe_in_words
from fp8doctor.diagnosis.engagement import invalidates
from fp8doctor.facts import Facts, Gpu, Linear, Workload, if_recorded, recorded
from fp8doctor.finding import Finding
from fp8doctor.recipes import STACKS
from fp8doctor.wording import percent, plural

SHOWN_PACKAGES = {"torchao": "torchao", "transformer_engine": "TE"}
"""Packages that are named if they are installed: import name -> what people call it."""

SXM = ("A100", "H100", "H200")
"""GPUs whose datasheet is that of the SXM board, which is faster than the PCIe one of the same name."""


def machine(facts: Facts, modelled_gpu: str) -> tuple[str, ...]:
    """Describe the GPU and the versions that matter."""
    return (_gpu(facts, product(modelled_gpu)), *_versions(facts))


def _gpu(facts: Facts, modelled: str) -> str:
    if not recorded(facts, "gpus"):
        return f"GPU unknown; estimates for {modelled}"
    visible = [gpu for gpu in facts.gpus if gpu.get("visible", True)]
    if not visible:
        hidden = f"{plural(len(facts.gpus), 'GPU')} hidden from this process" if facts.gpus else "no GPU"
        return f"{hidden}; estimates for {modelled}"
    labels = Counter(gpu_label(gpu) for gpu in visible)
    names = " + ".join(f"{count} x {label}" if count > 1 else label for label, count in labels.items())
    if not modelled:
        amd = all(gpu.get("vendor") == "amd" for gpu in visible)
        return f"{names}; no {'estimates for AMD' if amd else 'datasheet, so no estimates'}"
    assumed = facts.get("assumed_gpu")
    return f"{names}; estimates for {modelled}" if assumed else names


def fp8_share(facts: Facts) -> str:
    """Tell how many layers train in FP8, by which library and recipe."""
    linears = facts.network.linears
    in_fp8 = [linear for linear in linears if linear.use == "training"]
    stacks = [STACKS[each].in_words if each in STACKS else each for each in _names(in_fp8, "stack")]
    how = ", ".join((*stacks, *(recipe_in_words(each) for each in _names(in_fp8, "recipe"))))
    share = f"{len(in_fp8)} of {plural(len(linears), 'Linear')}"
    unknown = [linear for linear in linears if linear.use == "unknown"]
    if unknown and not in_fp8:
        return f"FP8 by name in {len(unknown)} of {plural(len(linears), 'Linear')}"
    if not linears and "network.linears" in facts.get("gaps", {}):
        return "its Linears could not be read"
    if stored := sum(map(stores_fp8, linears)) if not in_fp8 else 0:
        return f"FP8 weights in {stored} of {plural(len(linears), 'Linear')}, no FP8 training"
    if not in_fp8:
        calls = facts.network.get("fp8_calls", ())
        outside = f"; outside of them {calls[0]}" if calls else ""
        return f"no FP8 in {plural(len(linears), 'Linear')}{outside}"
    return f"FP8 ({how}) in {share}" if how else f"FP8 in {share}"


def _names(linears: Iterable[Linear], field: str) -> list[str]:
    read = (getattr(each, field) for each in linears if recorded(each, field))
    return list(dict.fromkeys(filter(None, read)))


def gpu_label(gpu: Gpu) -> str:
    name = gpu.get("name", "GPU")
    capability = gpu.get("compute_capability") or gpu.get("architecture")
    return f"{name}, {capability}" if capability else name


def product(gpu: str) -> str:
    """Name a GPU of the datasheet table as its maker sells it."""
    return f"{gpu} SXM" if gpu in SXM else gpu


def _versions(facts: Facts) -> tuple[str, ...]:
    if not recorded(facts, "software"):
        return ("torch unknown",)
    packages = facts.packages()
    stacks = (
        f"{label} {short_version(packages[name].get('version') or '')}".rstrip()
        for name, label in SHOWN_PACKAGES.items()
        if name in packages
    )
    torch = facts.software.get("torch", "unknown")
    return (f"torch {short_version(torch) if torch else 'missing'}", *stacks)


def short_version(version: str) -> str:
    """Write a version as one says it: 2.11.0+cu130 is 2.11; a CPU build stays visible."""
    release, _, build = version.partition("+")
    return release.removesuffix(".0") + ("+cpu" if build == "cpu" else "")


def model(facts: Facts) -> str:
    """Describe the model, its size and its batch; empty for the environment alone."""
    if not recorded(facts, "target"):
        return ""
    target = facts.target
    if target.get("kind") == "environment":
        return ""
    name = target.name if target.get("name") else "model"
    counted = facts.get("network.parameters")
    known = [f"{quantity(counted)} parameters"] if counted is not None else []
    known += [_batch(facts)] if recorded(facts, "workload") else []
    known += [step] if (step := if_recorded(_own_step, facts)) else []
    return f"{name}: {', '.join(known)}" if known else name


def _own_step(facts: Facts) -> str:
    """Describe the step of the user's script or training, as it ran."""
    steps = facts.observed.steps_ms
    return f"{median(steps):,.1f} ms/step in {plural(len(steps), 'step')} of {watched_job(facts)}"


def _batch(facts: Facts) -> str:
    workload, rows = facts.workload, if_recorded(main_rows, facts)
    size = workload.get("batch_size")
    length = workload.get("sequence_length")
    tokens = workload.get("tokens")
    if size and length:
        text = f"{size} x {length} tokens"
        if rows not in (None, tokens):
            text += f", {rows} rows in most layers"
    elif rows or tokens:
        text = f"{rows or tokens} rows"
    elif size:
        text = f"a batch of {size}"
    else:
        why = "batch not looked at" if steps_are_watched(facts) else "no synthetic batch"
        return why if lacks_batch(workload) else "batch unknown"
    count = workload.get("accumulate", 1)
    passes = facts.get("observed.backwards") or count
    if count > 1 and passes < count:
        text += f" in each of {count} calls ({passes} micro-batch{'' if passes == 1 else 'es'})"
    elif count > 1:
        text += f" in each of {count} micro-batches"
    made_up = workload.get("batch_source") == "made up"
    return f"{text} (synthetic)" if made_up else text


def steps_are_watched(facts: Facts) -> bool:
    """Return whether the steps are the user's own, with a batch of their own."""
    return facts.get("target.kind") in ("script", "live")


def lacks_batch(workload: Workload) -> bool:
    """Return whether the step has no batch, and why is known."""
    known = recorded(workload, "note") and recorded(workload, "batch_source")
    return known and workload.batch_source is None and bool(workload.note)


def quantity(count: int) -> str:
    """Write a count as one says it: 468.1 M, 8.03 B."""
    for factor, unit, digits in ((10**9, "B", 2), (10**6, "M", 1), (10**3, "k", 1)):
        if count >= 0.99995 * factor:
            return f"{count / factor:.{digits}f} {unit}"
    return str(count)


UNKNOWN = "unknown"
"""Stands for a fact that was not recorded."""


def job_facts(
    facts: Facts, tokens_per_s: float | None, findings: Sequence[Finding] = ()
) -> tuple[tuple[str, str], ...]:
    """Describe what decides about FP8, a label and a line for each; empty without a model."""
    if not recorded(facts, "network"):
        return ()
    rate = (("Tokens/s", f"{tokens_per_s:,.0f} {own_words(facts)}"),) if tokens_per_s else ()
    return (
        ("FP8", if_recorded(fp8_share, facts) or UNKNOWN),
        ("compiled", if_recorded(_compiled, facts, findings) or UNKNOWN),
        ("checkpointing", if_recorded(_checkpointing, facts) or UNKNOWN),
        ("LoRA", if_recorded(_lora, facts) or UNKNOWN),
        ("attention", if_recorded(_attention, facts) or UNKNOWN),
        ("Memory", if_recorded(memory_row, facts) or UNKNOWN),
        *rate,
    )


KERNELS = {"cudnn": "cuDNN", "flash": "flash", "efficient": "memory-efficient", "flex": "flex"}
"""Part of the operator or kernel of a fused attention -> its name for users; cuDNN's have both in theirs."""


def _attention(facts: Facts) -> str:
    """Name how attention is asked for, and the kernels that ran."""
    asked = dict.fromkeys(each.implementation for each in facts.network.get("attentions", ()))
    profiled = (each.get("breakdown") for each in facts.arms() if each.tried)
    groups = next((found.get("groups", ()) for found in profiled if found), ())
    ran = [each for each in groups if each.family == "attention"]
    names = [f"{each.get('operator') or ''} {each.name}".lower() for each in ran]
    found = (next((words for part, words in KERNELS.items() if part in name), "") for name in names)
    seen = set(filter(None, found))
    kernels = f"{' and '.join(sorted(seen))} kernel{'s' if len(seen) > 1 else ''}" if seen else ""
    unfused = "no fused kernel" if ran and not seen else ""
    none = "none found" if recorded(facts, "network.attentions") and not (asked or ran) else ""
    return ", ".join(filter(None, (*asked, kernels, unfused, none)))


def _compiled(facts: Facts, findings: Sequence[Finding]) -> str:
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
    """Describe checkpointing by the facts, or by the trial's step if only it tells."""
    found, ran = facts.training.checkpointing, facts.get("trial.recomputed")
    if ran or any(each.active is True for each in found):
        lists = [each for each in facts.blocks() if each.get("checkpointed")]
        if lists:
            blocks = plural(sum(each.count for each in lists), "block")
            return f"on in {sum(each.checkpointed for each in lists)} of {blocks}"
        flags = (each.flag for each in found if recorded(each, "flag"))
        return next((f"on ({flag})" for flag in flags), "on")
    undecided = next((each for each in found if each.active is not False), None)
    if undecided is None or (ran is not None and undecided.form == "called_in_forward"):
        return "off"
    return "possible (a forward calls checkpoint)"


def _lora(facts: Facts) -> str:
    network = facts.network
    if not network.adapter_parameters:
        return "none"
    shares = (
        [f"{percent(100.0 * network.adapter_parameters / network.parameters)} of parameters"]
        if network.get("parameters")
        else []
    )
    flops = flops_share_pct((linear for linear in facts.linears() if linear.adapter == "adapter"), facts)
    shares += [f"{percent(flops)} of matmul FLOPs"] if flops else []
    return ", ".join(shares) or "on"


LOSSES = {"output.loss": "the model's own", "mean": "the mean of the output"}
"""Source of the loss, if nobody gave one -> whose it is."""


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
    if lacks_batch(work) and not steps_are_watched(facts):
        why = (work.note or "").rstrip(".")
        told.append(f"{why[:1].upper()}{why[1:]}.")
    used = LOSSES.get(work.get("loss_source"))
    copied = not facts.get("observed.steps_ms") or recorded(facts, "trial.arms")
    if used and copied and trainer is not None and trainer.get("own_loss"):
        told.append(
            f"The loss is {used}; the Trainer's ({trainer.own_loss}) is not called: if it is another, "
            "give it as loss(output, batch) or training_step(model, batch)."
        )
    found = facts.get("training.checkpointing")
    later = trainer is not None and trainer.get("checkpointing") is True
    is_off = found is not None and all(each.get("active") is False for each in found)
    if later and is_off and facts.get("target.kind") != "script":
        told.append("Without the checkpointing that train() turns on.")
    return " ".join(told)
