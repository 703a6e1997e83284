"""Describe the GPUs by NVML and match them with torch's, without a CUDA context.

NVML counts GPUs in PCI order and ignores ``CUDA_VISIBLE_DEVICES``. They are matched by UUID with torch's
devices once CUDA is initialized, and before that by the variable's rules (`read_visible_devices`). UUIDs and
PCI addresses are never recorded.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from fp8doctor.errors import has_torch
from fp8doctor.facts import Gpu
from fp8doctor.facts.scrub import scrub
from fp8doctor.facts.unrecorded import NOT_RECORDED

_log = logging.getLogger("fp8doctor")

GIB = 2**30


class NoDriverError(Exception):
    """There is no NVIDIA driver, so no NVIDIA GPU."""


def examine_gpus(gaps: dict[str, str]) -> tuple[Any, Any]:
    """List this process's GPUs in its order, then the others; and return the NVIDIA driver's version.

    Gaps for what NVML does not tell.
    """
    torch = installed_torch()
    try:
        with open_nvml() as nvml:
            driver = str(nvml.nvmlSystemGetDriverVersion())
            return _gpus_of_nvml(nvml, torch, gaps), driver
    except NoDriverError:
        return _without_nvml(torch, gaps), None
    except Exception as error:
        _log.debug("the GPUs cannot be asked", exc_info=True)
        gaps["gpus"] = gaps["software.driver"] = scrub(f"the GPUs cannot be asked: {error}")
        return NOT_RECORDED, NOT_RECORDED


def _without_nvml(torch: Any, gaps: dict[str, str]) -> tuple[Gpu, ...]:
    """List the devices that torch has initialized itself, if no NVIDIA driver answers."""
    vendor: Literal["nvidia", "amd"] = "amd" if torch and torch.version.hip else "nvidia"
    unknown: tuple[Gpu, ...] = NOT_RECORDED
    try:
        if torch and torch.cuda.is_initialized():
            return _gpus_of_torch(torch, vendor)
        if vendor == "amd" and torch.cuda.device_count():
            gaps["gpus"] = "torch has not initialized HIP in this process, and to ask would do so"
            return unknown
    except Exception as error:
        _log.debug("torch's GPUs cannot be asked", exc_info=True)
        gaps["gpus"] = scrub(f"the GPUs cannot be asked: {error}")
        return unknown
    return ()


def installed_torch() -> Any:
    """Return torch, or None if this Python has none: it is an extra."""
    if not has_torch():
        return None
    import torch

    return torch


@contextmanager
def open_nvml() -> Iterator[Any]:
    """Initialize NVML, and shut it down at the end. Raises `NoDriverError`."""
    import pynvml  # type: ignore[import-untyped]

    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded) as error:
        raise NoDriverError from error
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def _gpus_of_nvml(nvml: Any, torch: Any, gaps: dict[str, str]) -> tuple[Gpu, ...]:
    cards = _cards(nvml, gaps)
    uuids = _uuids_of_torch(torch)
    known = {card.uuid.removeprefix("GPU-"): i for i, card in enumerate(cards)}
    if uuids and not known.keys() >= {*uuids}:
        return _gpus_of_torch(torch, "nvidia")  # slices of GPUs (MIG) have UUIDs of their own
    variable = os.environ.get("CUDA_VISIBLE_DEVICES")
    seen = [known[uuid] for uuid in uuids] or read_visible_devices(variable, cards)
    why = None if uuids else _why_unknown(nvml, variable, cards)
    if why is not None:
        gaps["gpus.visible"] = why
        return tuple(describe(nvml, card, NOT_RECORDED, False) for card in cards)
    cuda = torch.cuda if torch and torch.cuda.is_initialized() else None  # it counts itself if it has memory
    return (
        *(
            describe(nvml, cards[card], True, cuda is not None and bool(cuda.memory_reserved(i)))
            for i, card in enumerate(seen)
        ),
        *(describe(nvml, card, False, False) for i, card in enumerate(cards) if i not in seen),
    )


def _cards(nvml: Any, gaps: dict[str, str]) -> list[Card]:
    cards = []
    for i in range(nvml.nvmlDeviceGetCount()):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(i)
            cards.append(Card(handle, nvml.nvmlDeviceGetUUID(handle), nvml.nvmlDeviceGetName(handle)))
        except nvml.NVMLError as error:
            gaps[f"gpus.{i}"] = scrub(f"NVML failed: {error}")
    return cards


def _ask(
    nvml: Any, card: Card, question: str, convert: Callable[[Any], Any] = lambda answer: answer, *more: Any
) -> Any:
    """Return NVML's answer, converted; None if unsupported, `NOT_RECORDED` if it failed."""
    try:
        return convert(getattr(nvml, question)(card.handle, *more))
    except (nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound, nvml.NVMLError_NotFound):
        return None
    except nvml.NVMLError:
        return NOT_RECORDED


def _uuids_of_torch(torch: Any) -> list[str]:
    """List the UUIDs of torch's devices; empty before CUDA is initialized."""
    if torch is None or not torch.cuda.is_initialized():
        return []
    uuids = [
        str(getattr(torch.cuda.get_device_properties(i), "uuid", ""))
        for i in range(torch.cuda.device_count())
    ]
    return uuids if all(uuids) else []


def describe(nvml: Any, card: Card, visible: bool, ours: bool) -> Gpu:
    """Describe a card; ``ours``: this process has memory there."""
    ask, clock = partial(_ask, nvml, card), nvml.NVML_CLOCK_SM
    return Gpu(
        name=card.name,
        vendor="nvidia",
        compute_capability=ask("nvmlDeviceGetCudaComputeCapability", lambda pair: f"{pair[0]}.{pair[1]}"),
        architecture=None,
        memory_gib=ask("nvmlDeviceGetMemoryInfo", lambda info: info.total / GIB),
        memory_used_gib=ask("nvmlDeviceGetMemoryInfo", lambda info: info.used / GIB),
        visible=visible,
        sm_clock_mhz=ask("nvmlDeviceGetClockInfo", int, clock),
        sm_clock_max_mhz=ask("nvmlDeviceGetMaxClockInfo", int, clock),
        other_processes=ask(
            "nvmlDeviceGetComputeRunningProcesses", lambda processes: count_others(processes, ours)
        ),
    )


def count_others(processes: Sequence[Any], ours: bool) -> int:
    """Count other processes on the GPU.

    In a container NVML gives the host's process ids. Then one of them is this process if it has memory there
    (``ours``).
    """
    pids = {process.pid for process in processes}
    return len(pids) - (os.getpid() in pids or (ours and bool(pids)))


def _gpus_of_torch(torch: Any, vendor: Literal["nvidia", "amd"]) -> tuple[Gpu, ...]:
    """List torch's devices, once CUDA or HIP is initialized."""
    amd = vendor == "amd"
    return tuple(
        Gpu(
            name=each.name,
            vendor=vendor,
            compute_capability=None if amd else f"{each.major}.{each.minor}",
            architecture=each.gcnArchName.partition(":")[0] if amd else None,
            memory_gib=each.total_memory / GIB,
            visible=True,
        )
        for each in map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    )


@dataclass(frozen=True)
class Card:
    handle: Any
    uuid: str
    name: str


def read_visible_devices(variable: str | None, cards: Sequence[Card]) -> list[int]:
    """Return the cards of ``CUDA_VISIBLE_DEVICES``: indices, or UUIDs, which may be prefixes.

    As in driver 580 (tried on an H200), the first entry without a match ends the list, and a repeated entry
    before it empties the list.
    """
    if variable is None:
        return [*range(len(cards))]
    seen: list[int] = []
    for entry in map(str.strip, variable.split(",")):
        by_uuid = entry.startswith("GPU-") and entry != "GPU-"
        found = [
            i for i, card in enumerate(cards) if (card.uuid.startswith(entry) if by_uuid else entry == str(i))
        ]
        if len(found) != 1:
            break
        if found[0] in seen:
            return []
        seen += found
    return seen


def _why_unknown(nvml: Any, variable: str | None, cards: Sequence[Card]) -> str | None:
    if any(_ask(nvml, card, "nvmlDeviceGetMigMode", lambda modes: bool(modes[0])) is True for card in cards):
        return "a GPU is divided into slices (MIG)"
    mixed = len({card.name for card in cards}) > 1 and os.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID"
    if mixed and variable is not None:
        return (
            "CUDA_VISIBLE_DEVICES counts GPUs of different models, the fastest first unless "
            "CUDA_DEVICE_ORDER=PCI_BUS_ID"
        )
    return None
