"""What a person counts first, in words: FP8 layers by class, compiled blocks, checkpointing, LoRA."""

from __future__ import annotations

from fp8doctor.analysis.layers import Layers, flops_share_pct, fp8_layers
from fp8doctor.facts import Facts, if_recorded, recorded
from fp8doctor.wording import percent, plural


def counts(facts: Facts) -> tuple[str, ...]:
    """FP8 layers by class, compiled blocks, checkpointing, LoRA; unknown where it was not recorded."""
    return (
        *(if_recorded(_fp8_counts, facts) or ("te.Linear unknown", "Float8Linear unknown")),
        if_recorded(_compiled, facts) or "compiled unknown",
        if_recorded(_checkpointing, facts) or "checkpointing unknown",
        if_recorded(_lora, facts) or "LoRA unknown",
    )


def _fp8_counts(facts: Facts) -> tuple[str, ...]:
    *rarer, commonest = fp8_layers(facts)
    return *(_kind(layers, facts) for layers in rarer), _kind(commonest, facts, last=True)


def _kind(layers: Layers, facts: Facts, last: bool = False) -> str:
    """Name one class of FP8 layers; the total stands behind every number but zero, and behind the last."""
    text = f"{layers.label} {layers.count}" + (
        f" of {len(facts.network.linears)}" if layers.count or last else ""
    )
    notes = ["weights only"] if layers.storage_only else []
    notes += [f"{percent(layers.flops_share_pct)} of GEMM FLOPs"] if layers.flops_share_pct else []
    return f"{text} ({', '.join(notes)})" if notes else text


def _compiled(facts: Facts) -> str:
    blocks, linears = facts.blocks(), facts.linears()
    if blocks and all(recorded(each, "compiled") and recorded(each, "count") for each in blocks):
        return (
            f"compiled {sum(each.compiled for each in blocks)} of "
            f"{plural(sum(each.count for each in blocks), 'block')}"
        )
    if not linears:
        return "compiled unknown"
    return (
        f"compiled {sum(linear.compiled is not None for linear in linears)} of "
        f"{plural(len(linears), 'Linear')}"
    )


def _checkpointing(facts: Facts) -> str:
    """As the facts were read, and where only a run could tell, as the trial's first step ran."""
    ran = facts.trial.recomputed if recorded(facts, "trial.recomputed") else None
    if ran or any(each.active is True for each in facts.training.checkpointing):
        flagged = next((each for each in facts.training.checkpointing if recorded(each, "flag")), None)
        lists = [each for each in facts.blocks() if recorded(each, "checkpointed") and each.checkpointed]
        where = (
            f" in {sum(each.checkpointed for each in lists)} of "
            f"{plural(sum(each.count for each in lists), 'block')}"
            if lists
            else f" ({flagged.flag} of {_owner(flagged.name, facts)})"
            if flagged
            else ""
        )
        return f"checkpointing on{where}"
    undecided = next((each for each in facts.training.checkpointing if each.active is not False), None)
    if ran is not None and undecided and undecided.form == "called_in_forward":
        return "checkpointing off"
    return (
        f"checkpointing possible ({_owner(undecided.name, facts)}.forward calls checkpoint)"
        if undecided
        else "checkpointing off"
    )


def _owner(name: str, facts: Facts) -> str:
    """Find the class of the named module where the facts tell it, else its name."""
    if recorded(facts, "network.kind") and not name:
        return facts.network.kind.rpartition(".")[2]
    for blocks in facts.blocks():
        if name == blocks.name or (
            name.startswith(f"{blocks.name}.") and name.removeprefix(f"{blocks.name}.").isdigit()
        ):
            return blocks.kind.rpartition(".")[2]
    return name or "the model"


def _lora(facts: Facts) -> str:
    network = facts.network
    if not network.adapter_parameters:
        return "LoRA none"
    shares = (
        [f"{percent(100.0 * network.adapter_parameters / network.parameters)} of parameters"]
        if recorded(network, "parameters") and network.parameters
        else []
    )
    flops = flops_share_pct((linear for linear in facts.linears() if linear.adapter == "adapter"), facts)
    shares += [f"{percent(flops)} of GEMM FLOPs"] if flops else []
    return f"LoRA {', '.join(shares) or 'on'}"
