"""Describe the GPUs by NVML and match them with torch's, without a CUDA context.

NVML counts GPUs in PCI order and ignores ``CUDA_VISIBLE_DEVICES``. They are matched by UUID with torch's
devices once CUDA is initialized, and before that by the variable's rules (`read_visible_devices`). UUIDs and
PCI addresses are never recorded.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from fp8doctor.errors import has_torch
from fp8doctor.facts import Gpu
from fp8doctor.facts.scrub import scrub
from fp8doctor.facts.unrecorded import NOT_RECORDED

_log = logging.getLogger("fp8doctor")

GIB = 2**30

THROTTLE_REASONS = {
    0x004: "software power cap",
    0x008: "hardware slowdown",
    0x010: "sync boost",
    0x020: "software thermal slowdown",
    0x040: "hardware thermal slowdown",
    0x080: "hardware power brake",
    0x100: "display clock setting",
    0x200: "board limit",
    0x400: "reliability",
}
"""Bits of NVML's clock event reasons (nvml.h, nvmlClocksEventReason*). Idle (0x001) and clocks set by the
owner (0x002) are no throttling."""


class NoDriverError(Exception):
    """There is no NVIDIA driver, so no NVIDIA GPU."""


def examine_gpus(gaps: dict[str, str]) -> tuple[Gpu, ...]:
    """List this process's GPUs in its order, then the others; a gap if NVML fails."""
    torch = installed_torch()
    gpus: tuple[Gpu, ...] = NOT_RECORDED
    try:
        gpus = _gpus_of_torch(torch, "amd") if torch and torch.version.hip else _gpus_of_nvidia(torch, gaps)
    except Exception as error:
        _log.debug("the GPUs cannot be asked", exc_info=True)
        gaps["gpus"] = scrub(f"the GPUs cannot be asked: {error}")
    return gpus


def installed_torch() -> Any:
    """Return torch, or None if this Python has none: it is an extra."""
    if not has_torch():
        return None
    import torch

    return torch


def driver_version(gaps: dict[str, str]) -> str | None:
    """Return the NVIDIA driver's version, such as ``580.159.03``, or None."""
    version: str | None = NOT_RECORDED
    try:
        with open_nvml() as nvml:
            version = str(nvml.nvmlSystemGetDriverVersion())
    except NoDriverError:
        version = None
    except Exception as error:
        _log.debug("NVML failed", exc_info=True)
        gaps["software.driver"] = scrub(f"NVML failed: {error}")
    return version


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


def _gpus_of_nvidia(torch: Any, gaps: dict[str, str]) -> tuple[Gpu, ...]:
    try:
        with open_nvml() as nvml:
            return _gpus_of_nvml(nvml, torch, gaps)
    except NoDriverError:
        return _gpus_of_torch(torch, "nvidia") if torch and torch.cuda.is_initialized() else ()


def _gpus_of_nvml(nvml: Any, torch: Any, gaps: dict[str, str]) -> tuple[Gpu, ...]:
    cards = _cards(nvml, gaps)
    uuids = _uuids_of_torch(torch)
    sights = match_uuids(uuids, cards) if uuids else None
    if sights is None:
        variable = os.environ.get("CUDA_VISIBLE_DEVICES")
        sights = read_visible_devices(variable, cards)
        if order_is_unknown(variable, sights, cards):
            gaps["gpus.visible"] = (
                "CUDA_VISIBLE_DEVICES counts GPUs of different models, the fastest first unless "
                "CUDA_DEVICE_ORDER=PCI_BUS_ID"
            )
            return tuple(describe(nvml, card, None, NOT_RECORDED, False) for card in cards)
    cuda = (
        torch.cuda if torch and torch.cuda.is_initialized() else None
    )  # NVML counts this process where it has memory
    seen = [
        describe(nvml, cards[card], part, True, cuda is not None and bool(cuda.memory_reserved(i)))
        for i, (card, part) in enumerate(sights)
    ]
    hidden = [
        describe(nvml, card, None, False, False)
        for i, card in enumerate(cards)
        if i not in {sight[0] for sight in sights}
    ]
    return (*seen, *hidden)


def _cards(nvml: Any, gaps: dict[str, str]) -> list[Card]:
    cards = []
    for i in range(nvml.nvmlDeviceGetCount()):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(i)
            cards.append(
                Card(
                    handle,
                    nvml.nvmlDeviceGetUUID(handle),
                    nvml.nvmlDeviceGetName(handle),
                    _slices(nvml, handle),
                )
            )
        except nvml.NVMLError as error:
            gaps[f"gpus.{i}"] = scrub(f"NVML failed: {error}")
    return cards


def _slices(nvml: Any, handle: Any) -> tuple[Slice, ...]:
    found = []
    for i in range(_ask(nvml, nvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0):
        part = _ask(nvml, nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, i)
        if part is not None and part is not NOT_RECORDED:
            found.append(Slice(part, nvml.nvmlDeviceGetUUID(part)))
    return tuple(found)


def _ask(nvml: Any, question: Callable[..., Any], *arguments: Any) -> Any:
    """Return NVML's answer; None if unsupported, `NOT_RECORDED` if it failed."""
    try:
        return question(*arguments)
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


def describe(nvml: Any, card: Card, part: int | None, visible: bool, ours: bool) -> Gpu:
    """Describe a card, or a MIG slice with its own name and memory."""
    handle = card.handle if part is None else card.slices[part].handle
    name = card.name if part is None else _ask(nvml, nvml.nvmlDeviceGetName, handle)
    memory = _ask(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
    capability = _ask(nvml, nvml.nvmlDeviceGetCudaComputeCapability, card.handle)
    limit = _ask(nvml, nvml.nvmlDeviceGetPowerManagementLimit, card.handle)
    default_limit = _ask(nvml, nvml.nvmlDeviceGetPowerManagementDefaultLimit, card.handle)
    return Gpu(
        name=name,
        vendor="nvidia",
        compute_capability=_each(capability, lambda pair: f"{pair[0]}.{pair[1]}"),
        architecture=None,
        memory_gib=_each(memory, lambda info: info.total / GIB),
        memory_used_gib=_each(memory, lambda info: info.used / GIB),
        visible=visible,
        mig=_each(_ask(nvml, nvml.nvmlDeviceGetMigMode, card.handle), lambda modes: bool(modes[0])),
        sm_clock_mhz=_ask(nvml, nvml.nvmlDeviceGetClockInfo, card.handle, nvml.NVML_CLOCK_SM),
        sm_clock_max_mhz=_ask(nvml, nvml.nvmlDeviceGetMaxClockInfo, card.handle, nvml.NVML_CLOCK_SM),
        power_limit_w=_each(limit, lambda milliwatt: milliwatt / 1000),
        power_limit_default_w=_each(default_limit, lambda milliwatt: milliwatt / 1000),
        throttle_reasons=_throttle_reasons(nvml, card.handle),
        other_processes=_each(
            _ask(nvml, nvml.nvmlDeviceGetComputeRunningProcesses, handle),
            lambda processes: count_others(processes, ours),
        ),
    )


def _each(answer: Any, convert: Callable[[Any], Any]) -> Any:
    return answer if answer is None or answer is NOT_RECORDED else convert(answer)


def _throttle_reasons(nvml: Any, handle: Any) -> tuple[str, ...]:
    bits = _ask(nvml, nvml.nvmlDeviceGetCurrentClocksEventReasons, handle)
    if bits is None:  # drivers before 535 know only the old name
        bits = _ask(nvml, nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle)
    reasons: tuple[str, ...] = NOT_RECORDED
    if bits is not None and bits is not NOT_RECORDED:
        reasons = tuple(reason for bit, reason in THROTTLE_REASONS.items() if bits & bit)
    return reasons


def count_others(processes: Sequence[Any], ours: bool) -> int:
    """Count other processes on the GPU.

    In a container NVML gives the host's process ids. Then one of them is this process if it has memory there
    (``ours``).
    """
    pids = {process.pid for process in processes}
    return len(pids) - (os.getpid() in pids or (ours and bool(pids)))


def _gpus_of_torch(torch: Any, vendor: Literal["nvidia", "amd"]) -> tuple[Gpu, ...]:
    """List torch's devices. Raises RuntimeError before CUDA or HIP is initialized."""
    if not torch.cuda.device_count():
        return ()
    if not torch.cuda.is_initialized():
        raise RuntimeError("torch has not initialized HIP in this process, and to ask would do so")
    return tuple(
        _describe_by_torch(torch.cuda.get_device_properties(i), vendor)
        for i in range(torch.cuda.device_count())
    )


def _describe_by_torch(properties: Any, vendor: Literal["nvidia", "amd"]) -> Gpu:
    amd = vendor == "amd"
    return Gpu(
        name=properties.name,
        vendor=vendor,
        compute_capability=None if amd else f"{properties.major}.{properties.minor}",
        architecture=properties.gcnArchName.partition(":")[0] if amd else None,
        memory_gib=properties.total_memory / GIB,
        visible=True,
    )


@dataclass(frozen=True)
class Slice:
    """A MIG instance."""

    handle: Any
    uuid: str


@dataclass(frozen=True)
class Card:
    """A GPU in NVML's list."""

    handle: Any
    uuid: str
    name: str
    slices: tuple[Slice, ...]


Sight = tuple[int, int | None]
"""A visible device: index of the card, and of its MIG slice."""


def read_visible_devices(variable: str | None, cards: Sequence[Card]) -> list[Sight]:
    """Return the devices of ``CUDA_VISIBLE_DEVICES``: indices, GPU or MIG UUIDs.

    UUIDs may be prefixes. As in driver 580 (tried on an H200), the first entry without a match ends the list,
    and a repeated entry before it empties the list.
    """
    everything: list[Sight] = [_whole(i, card) for i, card in enumerate(cards)]
    if variable is None:
        return everything
    sights: list[Sight] = []
    kind = variable[:4] if variable.startswith(("GPU-", "MIG-")) else "index"
    for entry in variable.split(","):
        sight = _by_index(entry, everything) if kind == "index" else _by_uuid(entry, kind, cards)
        if sight is None:
            break
        if sight in sights:
            return []
        sights.append(sight)
    return sights


def _whole(index: int, card: Card) -> Sight:
    """Return a card as CUDA shows it: in MIG mode its first slice."""
    return index, 0 if card.slices else None


def _by_index(entry: str, everything: list[Sight]) -> Sight | None:
    """Find the entry as C's ``strtoul`` reads it: ``1gpu`` is 1."""
    number = re.match(r"[+-]?\d+", entry.strip(), re.ASCII)
    index = int(number.group()) if number else -1
    return everything[index] if 0 <= index < len(everything) else None


def _by_uuid(entry: str, kind: str, cards: Sequence[Card]) -> Sight | None:
    """Find the only card or slice whose UUID begins with the entry."""
    if not entry.startswith(kind) or entry == kind:
        return None
    if kind == "GPU-":
        found = [_whole(i, card) for i, card in enumerate(cards) if card.uuid.startswith(entry)]
    else:
        found = [
            (i, j)
            for i, card in enumerate(cards)
            for j, part in enumerate(card.slices)
            if part.uuid.startswith(entry)
        ]
    return found[0] if len(found) == 1 else None


def order_is_unknown(variable: str | None, sights: list[Sight], cards: Sequence[Card]) -> bool:
    """Tell if indices choose among different models in CUDA's unknown order."""
    by_index = variable is not None and not variable.startswith(("GPU-", "MIG-"))
    mixed = len({card.name for card in cards}) > 1 and os.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID"
    return by_index and mixed and 0 < len(sights) < len(cards)


def match_uuids(uuids: Sequence[str], cards: Sequence[Card]) -> list[Sight] | None:
    """List the cards and slices with these UUIDs; None if NVML lacks one."""
    known: dict[str, Sight] = {
        card.uuid.removeprefix("GPU-"): _whole(i, card) for i, card in enumerate(cards)
    }
    known |= {
        part.uuid.removeprefix("MIG-"): (i, j)
        for i, card in enumerate(cards)
        for j, part in enumerate(card.slices)
    }
    sights = [known.get(uuid.removeprefix("GPU-").removeprefix("MIG-")) for uuid in uuids]
    return None if None in sights else [sight for sight in sights if sight is not None]
