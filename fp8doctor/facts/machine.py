"""The machine of the job: software, environment variables, GPUs."""

from typing import Annotated, Literal

from msgspec import Meta

from fp8doctor.facts.record import Prose, Record
from fp8doctor.facts.unrecorded import NOT_RECORDED


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
