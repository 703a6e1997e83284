"""What a person counts first, in words: FP8 layers by class, compiled blocks, checkpointing, LoRA."""

from __future__ import annotations

from fp8doctor.analysis.layers import Layers, flops_share_pct, fp8_layers
from fp8doctor.facts import Blocks, Linear, Network, Training, recorded
from fp8doctor.wording import percent, plural


def counts(network: Network, training: Training) -> tuple[str, ...]:
    """What a person counts first: FP8 layers by class, compiled blocks, checkpointing, LoRA. What was not
    recorded is unknown."""
    return (*_fp8_counts(network), _compiled(network), _checkpointing(network, training), _lora(network))


def _fp8_counts(network: Network) -> tuple[str, ...]:
    if not (recorded(network) and recorded(network.linears)):
        return "te.Linear unknown", "Float8Linear unknown"
    *rarer, commonest = fp8_layers(network.linears)
    return *(_kind(layers, network) for layers in rarer), _kind(commonest, network, last=True)


def _kind(layers: Layers, network: Network, last: bool = False) -> str:
    """One class of FP8 layers; the total stands behind every number but zero, and behind the last."""
    text = f"{layers.label} {layers.count}" + (f" of {len(network.linears)}" if layers.count or last else "")
    notes = ["weights only"] if layers.storage_only else []
    notes += [f"{percent(layers.flops_share_pct)} of GEMM FLOPs"] if layers.flops_share_pct else []
    return f"{text} ({', '.join(notes)})" if notes else text


def _compiled(network: Network) -> str:
    blocks, linears = _blocks(network), _linears(network)
    if blocks and all(recorded(each.compiled) for each in blocks):
        return (
            f"compiled {sum(each.compiled for each in blocks)} of "
            f"{plural(sum(each.count for each in blocks), 'block')}"
        )
    if linears and all(recorded(linear.compiled) for linear in linears):
        return (
            f"compiled {sum(linear.compiled is not None for linear in linears)} of "
            f"{plural(len(linears), 'Linear')}"
        )
    return "compiled unknown"


def _checkpointing(network: Network, training: Training) -> str:
    if not (recorded(training) and recorded(training.checkpointing)):
        return "checkpointing unknown"
    if any(each.active is True for each in training.checkpointing):
        lists = [each for each in _blocks(network) if recorded(each.checkpointed) and each.checkpointed]
        where = (
            f" in {sum(each.checkpointed for each in lists)} of "
            f"{plural(sum(each.count for each in lists), 'block')}"
            if lists
            else ""
        )
        return f"checkpointing on{where}"
    undecided = next((each for each in training.checkpointing if each.active is not False), None)
    return (
        f"checkpointing possible ({_owner(undecided.name, network)}.forward calls checkpoint)"
        if undecided
        else "checkpointing off"
    )


def _owner(name: str, network: Network) -> str:
    """The class of the named module where the facts tell it, else its name."""
    if recorded(network) and recorded(network.kind) and not name:
        return network.kind.rpartition(".")[2]
    for blocks in _blocks(network):
        if name == blocks.name or (
            name.startswith(f"{blocks.name}.") and name.removeprefix(f"{blocks.name}.").isdigit()
        ):
            return blocks.kind.rpartition(".")[2]
    return name or "the model"


def _lora(network: Network) -> str:
    if not (recorded(network) and recorded(network.adapter_parameters)):
        return "LoRA unknown"
    if not network.adapter_parameters:
        return "LoRA none"
    shares = (
        [f"{percent(100.0 * network.adapter_parameters / network.parameters)} of parameters"]
        if network.parameters
        else []
    )
    flops = flops_share_pct(linear for linear in _linears(network) if linear.adapter == "adapter")
    shares += [f"{percent(flops)} of GEMM FLOPs"] if flops else []
    return f"LoRA {', '.join(shares) or 'on'}"


def _blocks(network: Network) -> tuple[Blocks, ...]:
    return network.blocks if recorded(network) and recorded(network.blocks) else ()


def _linears(network: Network) -> tuple[Linear, ...]:
    return network.linears if recorded(network) and recorded(network.linears) else ()
