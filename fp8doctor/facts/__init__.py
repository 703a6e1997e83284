"""The facts: observations as plain frozen records without a torch object.

Every field defaults to `NOT_RECORDED`: nobody looked, the library could not tell, or the recording is older
than the field. A check that needs it then says "unknown". ``None`` and empty tuples mean the opposite:
looked, and none is there. Units stand in the names: ``_gib``, ``_ms``, ``_pct``, ``_mhz``, ``_w``.
"""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import Meta

from fp8doctor.facts.arm_names import ArmName
from fp8doctor.facts.network import Attention, Blocks, Linear, Network, Scaling, Use
from fp8doctor.facts.record import (
    NOT_RECORDED,
    Prose,
    Record,
    Unrecorded,
    Value,
    from_builtins,
    if_recorded,
    once,
    recorded,
    restore_unknown_keys,
    to_builtins,
    unknown_keys,
)
from fp8doctor.facts.training import (
    Accelerate,
    Checkpointing,
    CompileMark,
    Conversion,
    Converter,
    Distributed,
    Dynamo,
    TrainerArguments,
    Training,
    Workload,
)
from fp8doctor.facts.trial import (
    Arm,
    ArmCut,
    Breakdown,
    Family,
    Health,
    HostLoad,
    KernelGroup,
    MemoryParts,
    NotFinite,
    Observation,
    Rank,
    Ranks,
    Trial,
)


class Package(Record, frozen=True, kw_only=True):
    """An installed distribution."""

    version: str | None = NOT_RECORDED
    """None if the package can be found but its metadata cannot."""
    imported: bool = NOT_RECORDED
    """True if the inspected process had imported it."""


class Software(Record, frozen=True, kw_only=True):
    """Versions that decide whether FP8 runs. ``None``: not installed, or not built in."""

    python: str = NOT_RECORDED
    platform: str = NOT_RECORDED
    """Operating system and architecture, such as ``linux x86_64``; never the host's name."""
    torch: str | None = NOT_RECORDED
    cuda: str | None = NOT_RECORDED
    """CUDA version torch was built with (``torch.version.cuda``)."""
    hip: str | None = NOT_RECORDED
    """ROCm version torch was built with (``torch.version.hip``)."""
    driver: str | None = NOT_RECORDED
    """NVIDIA driver version, from NVML."""
    cublaslt: str | None = NOT_RECORDED
    cudnn: str | None = NOT_RECORDED
    triton: str | None = NOT_RECORDED
    packages: dict[str, Package] = NOT_RECORDED
    """Installed packages of the FP8 world by import name; one that is absent is not installed."""


class Environment(Record, frozen=True, kw_only=True):
    """Environment variables on the list of `fp8doctor.examine.environment`, and files that they name."""

    variables: dict[str, Prose] = NOT_RECORDED
    backend_imports: dict[str, Prose | None] = NOT_RECORDED
    """FP8 backend that Accelerate will import (TE, AO, MSAMP) -> why a fresh process cannot import it, None
    when it can or this process has. Empty when nothing asks for FP8 through Accelerate, or there is no
    backend to take."""
    debug_switches: dict[str, bool] = NOT_RECORDED
    """Switches of this process that are set by a call: ``anomaly_detection``, ``deterministic_algorithms``,
    ``fill_uninitialized_memory``."""


class Gpu(Record, frozen=True, kw_only=True):
    """One GPU as NVML (torch, on AMD) describes it, in the process's order."""

    name: str = NOT_RECORDED
    vendor: Literal["nvidia", "amd"] = NOT_RECORDED
    compute_capability: Annotated[str, Meta(pattern=r"^\d+\.\d+$")] | None = NOT_RECORDED
    """``major.minor``, such as ``9.0``; None on AMD."""
    architecture: str | None = NOT_RECORDED
    """AMD's ``gcnArchName`` (``gfx942``); None on NVIDIA."""
    memory_gib: float | None = NOT_RECORDED
    memory_used_gib: float | None = NOT_RECORDED
    visible: bool = NOT_RECORDED
    """True if ``CUDA_VISIBLE_DEVICES`` leaves it to this process."""
    other_processes: int | None = NOT_RECORDED
    """Compute processes on this GPU besides the inspected one."""


class Target(Record, frozen=True, kw_only=True):
    """The inspected target. No folder is recorded, only the name that the user knows."""

    kind: Literal["file", "module", "live", "script", "environment"] = NOT_RECORDED
    name: str = NOT_RECORDED
    """File name, module name, or the class name of a live model. A script is named like a file."""
    attribute: str | None = NOT_RECORDED
    """The name in the file that gave the model (``build_model``, ``model``, ...)."""
    layers: int | None = NOT_RECORDED
    """Layers that ``--layers`` asked for, which makes it a cut of the user's model; None if it is whole."""
    module: bool = NOT_RECORDED
    """True if a script was started by its module's name, with ``-m``."""
    digest: str = NOT_RECORDED
    """First 16 hexadecimal digits of the SHA-256 of a script's file as it started."""


class Facts(Record, frozen=True, kw_only=True, dict=True):
    """Everything that was observed of one job. Beside the fields, it keeps what `once` computed."""

    target: Target = NOT_RECORDED
    software: Software = NOT_RECORDED
    environment: Environment = NOT_RECORDED
    gpus: tuple[Gpu, ...] = NOT_RECORDED
    """All GPUs NVML sees, the visible ones marked; empty if there is none."""
    network: Network = NOT_RECORDED
    training: Training = NOT_RECORDED
    workload: Workload = NOT_RECORDED
    observed: Observation = NOT_RECORDED
    """Steps of the user's own script; not recorded if none was watched to its end."""
    not_finite: NotFinite = NOT_RECORDED
    """Not recorded if every watched step was finite, or none was watched."""
    ranks: Ranks = NOT_RECORDED
    """The processes of the job that a launcher started; not recorded if the script is the only one."""
    trial: Trial = NOT_RECORDED
    """The timed probe; not recorded when none was asked for or there was no device for it."""
    assumed_gpu: str | None = NOT_RECORDED
    """GPU name given by ``--assume-gpu`` for the modelled costs."""
    script_error: Prose = NOT_RECORDED
    """The exception that ended a script before its first step, in a line; not recorded without one."""
    gaps: dict[str, Prose] = NOT_RECORDED
    """Dotted path of a fact that could not be read -> the reason."""
    unrecognized: dict[str, Any] = NOT_RECORDED
    """Keys of a recording that this version does not know, kept for the next save."""

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Facts:
        """Read facts, and keep unknown keys. Raises `UnreadableDocument` naming a wrong one."""
        facts = from_builtins(cls, data)
        unknown = unknown_keys(data, to_builtins(facts))
        return msgspec.structs.replace(facts, unrecognized=unknown) if unknown else facts

    def linears(self) -> tuple[Linear, ...]:
        return self.network.linears if recorded(self, "network.linears") else ()

    def blocks(self) -> tuple[Blocks, ...]:
        return self.network.blocks if recorded(self, "network.blocks") else ()

    def arms(self) -> tuple[Arm, ...]:
        return self.trial.arms if recorded(self, "trial.arms") else ()

    def accelerate(self) -> Accelerate | None:
        return self.training.accelerate if recorded(self, "training.accelerate") else None

    def trainer(self) -> TrainerArguments | None:
        return self.training.trainer if recorded(self, "training.trainer") else None

    def variables(self) -> dict[str, str]:
        return self.environment.variables if recorded(self, "environment.variables") else {}

    def packages(self) -> dict[str, Package]:
        return self.software.packages if recorded(self, "software.packages") else {}

    def to_dict(self) -> dict[str, Any]:
        """Plain values, the inverse of `from_dict`."""
        data = to_builtins(self)
        restored: dict[str, Any] = restore_unknown_keys(data, data.pop("unrecognized", None))
        return restored


def path_of(missing: Unrecorded) -> str:
    """Return the path of the fact that was read, as reports name it: ``network.linears.compiled``."""
    place = _places().get(missing.kind, missing.kind.__name__)
    return f"{place}.{missing.field}".removeprefix(".")


@cache
def _places() -> dict[type, str]:
    """Type of a record -> the path at which it stands in the facts, each once."""
    places: dict[type, str] = {Facts: ""}
    pending: list[type[Record]] = [Facts]
    while pending:
        kind = pending.pop()
        for field in msgspec.structs.fields(kind):
            for inner in _records(field.type):
                if inner not in places:
                    places[inner] = f"{places[kind]}.{field.name}".removeprefix(".")
                    pending.append(inner)
    return places


def _records(annotation: Any) -> list[type[Record]]:
    """List the records that a value of this type may be or hold."""
    if isinstance(annotation, type):
        return [annotation] if issubclass(annotation, Record) else []
    return [record for inner in get_args(annotation) for record in _records(inner)]
