"""What the facts add up to, for the first screen and for checks: counts, shares, who asked for FP8."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from fp8doctor.facts import Blocks, Facts, Linear, Network, Training, recorded

LAUNCHER_FINGERPRINT = ("ACCELERATE_FP8_FORMAT", "ACCELERATE_FP8_MARGIN", "ACCELERATE_FP8_OPT_LEVEL")
"""``accelerate launch`` writes these together, whatever the backend, and only with ``--mixed_precision fp8``: they stay when
something rewrites ``ACCELERATE_MIXED_PRECISION``. A user who tunes one backend by hand sets them one at a time.
Source: ``setup_fp8_env`` in accelerate ``utils/launch.py``, read in 1.4.0, 1.8.1, 1.9.0 and 1.15.0."""

KEEP_IT_IN_MODULE = ("DistributedDataParallel", "DataParallel", "DeepSpeedEngine")
"""Wrappers behind whose ``module`` the attributes of the model are; the others hand them on."""


@dataclass(frozen=True)
class Layers:
    """How many layers of one class are in FP8, and their share of the GEMM FLOPs."""

    label: str
    count: int
    flops_share_pct: float
    storage_only: bool = False
    """Only their weights are in low precision; they do not train in FP8."""


def fp8_was_asked_for(facts: Facts) -> str | None:
    """Who asked for FP8, in words; None when nobody did or nothing of it was recorded."""
    variables = facts.environment.variables if recorded(facts.environment) and recorded(facts.environment.variables) else {}
    asked = asked_by_environment(variables)
    if asked:
        return asked
    if recorded(facts.training):
        accelerate, trainer = facts.training.accelerate, facts.training.trainer
        if recorded(accelerate) and accelerate and accelerate.mixed_precision == "fp8":
            return "Accelerator(mixed_precision='fp8')"
        if recorded(trainer) and trainer and trainer.mixed_precision == "fp8":
            return "TrainingArguments"
    return None


def asked_by_environment(variables: Mapping[str, str]) -> str | None:
    """How the environment, or the launcher through it, asks for FP8; None when it does not."""
    precision = variables.get("ACCELERATE_MIXED_PRECISION", "")
    if precision.lower() == "fp8":
        return f"ACCELERATE_MIXED_PRECISION={precision}"
    return "accelerate launch --mixed_precision fp8" if launched_with_fp8(variables) else None


def launched_with_fp8(variables: Mapping[str, str]) -> bool:
    """Whether ``accelerate launch`` started this process with ``--mixed_precision fp8``, by what it leaves in the environment."""
    return all(name in variables for name in LAUNCHER_FINGERPRINT)


def in_python(name: str, network: Network) -> str:
    """How a script that calls its model ``model`` writes one of its modules: ``model.layers``, ``model[1].layers``."""
    wrapped = recorded(network.wrappers) and any(each in KEEP_IT_IN_MODULE for each in network.wrappers)
    parts = ("." + part if part.isidentifier() else f"[{part}]" if part.isdigit() else f"[{part!r}]" for part in name.split(".") if part)
    return "".join(("model.module" if wrapped else "model", *parts))


def layer_label(linear: Linear) -> str:
    """The name a user knows a layer's class by: ``te.Linear``, ``Float8Linear``, ``Linear``, ``Linear of Float8Tensor``."""
    name = linear.kind.rpartition(".")[2] if recorded(linear.kind) else "unknown"
    if name == "Linear" and recorded(linear.weight_class) and linear.weight_class:
        return f"{name} of {linear.weight_class.rpartition('.')[2]}"
    return f"te.{name}" if linear.stack == "transformer_engine" else name


def fp8_layers(linears: tuple[Linear, ...]) -> tuple[Layers, ...]:
    """Layers in FP8 by class, the rarest first; ``te.Linear`` and ``Float8Linear`` are always among them."""
    found: dict[tuple[str, bool], list[Linear]] = {("te.Linear", False): [], ("Float8Linear", False): []}
    for linear in linears:
        if linear.use in ("training", "storage"):
            found.setdefault((layer_label(linear), linear.use == "storage"), []).append(linear)
    kinds = (Layers(label, len(members), flops_share_pct(members), storage_only) for (label, storage_only), members in found.items())
    return tuple(sorted(kinds, key=lambda layers: layers.count))


FP8_MULTIPLE = 16
"""Elements; what both sides of an FP8 GEMM's weight have to be multiples of. Source: torch ``_check_scaled_mm_sizes``, CUDA only."""


def fits_fp8(linear: Linear) -> bool:
    """Whether an FP8 GEMM takes both sides of the layer's weight as they are."""
    return linear.in_features % FP8_MULTIPLE == 0 and linear.out_features % FP8_MULTIPLE == 0


def flops_share_pct(linears: Iterable[Linear]) -> float:
    """The share of the model's GEMM FLOPs that these layers have together, as far as it is known."""
    return sum(linear.flops_share_pct or 0.0 for linear in linears)


def counts(network: Network, training: Training) -> tuple[str, ...]:
    """What a person counts first: FP8 layers by class, compiled blocks, checkpointing, LoRA. What was not recorded is unknown."""
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
        return f"compiled {sum(each.compiled for each in blocks)} of {plural(sum(each.count for each in blocks), 'block')}"
    if linears and all(recorded(linear.compiled) for linear in linears):
        return f"compiled {sum(linear.compiled is not None for linear in linears)} of {plural(len(linears), 'Linear')}"
    return "compiled unknown"


def _checkpointing(network: Network, training: Training) -> str:
    if not (recorded(training) and recorded(training.checkpointing)):
        return "checkpointing unknown"
    if any(each.active is True for each in training.checkpointing):
        lists = [each for each in _blocks(network) if recorded(each.checkpointed) and each.checkpointed]
        where = f" in {sum(each.checkpointed for each in lists)} of {plural(sum(each.count for each in lists), 'block')}" if lists else ""
        return f"checkpointing on{where}"
    undecided = next((each for each in training.checkpointing if each.active is not False), None)
    return f"checkpointing possible ({_owner(undecided.name, network)}.forward calls checkpoint)" if undecided else "checkpointing off"


def _owner(name: str, network: Network) -> str:
    """The class of the named module where the facts tell it, else its name."""
    if recorded(network) and recorded(network.kind) and not name:
        return network.kind.rpartition(".")[2]
    for blocks in _blocks(network):
        if name == blocks.name or (name.startswith(f"{blocks.name}.") and name.removeprefix(f"{blocks.name}.").isdigit()):
            return blocks.kind.rpartition(".")[2]
    return name or "the model"


def _lora(network: Network) -> str:
    if not (recorded(network) and recorded(network.adapter_parameters)):
        return "LoRA unknown"
    if not network.adapter_parameters:
        return "LoRA none"
    shares = [f"{percent(100.0 * network.adapter_parameters / network.parameters)} of parameters"] if network.parameters else []
    flops = flops_share_pct(linear for linear in _linears(network) if linear.adapter == "adapter")
    shares += [f"{percent(flops)} of GEMM FLOPs"] if flops else []
    return f"LoRA {', '.join(shares) or 'on'}"


def _blocks(network: Network) -> tuple[Blocks, ...]:
    return network.blocks if recorded(network) and recorded(network.blocks) else ()


def _linears(network: Network) -> tuple[Linear, ...]:
    return network.linears if recorded(network) and recorded(network.linears) else ()


def percent(share: float) -> str:
    """A share in per cent, with a digit more where it is small: 86 %, 2.3 %, 0.04 %."""
    if 0 < share < 0.01:
        return "< 0.01 %"
    return f"{share:.0f} %" if share >= 10 else f"{share:.2g} %"


def plural(count: int, noun: str) -> str:
    """A count with its noun: 1 block, 24 blocks."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
