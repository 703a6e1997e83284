"""Describe the GPUs by NVML and match them with torch's, without a CUDA context.

NVML counts GPUs in PCI order and ignores ``CUDA_VISIBLE_DEVICES``. They are matched by UUID with torch's
devices once CUDA is initialized, and before that by the variable's rules (`read_visible_devices`). UUIDs and
PCI addresses are never recorded.
"""

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from fp8doctor.errors import has_torch
from fp8doctor.facts import NOT_RECORDED, Gpu
from fp8doctor.facts.scrub import scrub

_log = logging.getLogger("fp8doctor")

GIB = 2**30


class NoDriverError(Exception):
    """There is no NVIDIA driver, so no NVIDIA GPU."""


class Card(NamedTuple):
    handle: Any
    uuid: str
    name: str


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


def examine_gpus(gaps: dict[str, str]) -> tuple[Any, Any]:
    """List this process's GPUs in its order, then the others; and return the NVIDIA driver's version.

    Gaps for what NVML does not tell. Without a driver the GPUs are those that torch has initialized.
    """
    try:
        return _gpus_and_driver(gaps)
    except Exception as error:
        _log.debug("the GPUs cannot be asked", exc_info=True)
        gaps["gpus"] = gaps["software.driver"] = scrub(f"the GPUs cannot be asked: {error}")
        return NOT_RECORDED, NOT_RECORDED


def _gpus_and_driver(gaps: dict[str, str]) -> tuple[Any, str | None]:
    torch = installed_torch()
    cuda = torch.cuda if torch and torch.cuda.is_initialized() else None
    with suppress(NoDriverError), open_nvml() as nvml:
        return _gpus_of_nvml(nvml, cuda, gaps), str(nvml.nvmlSystemGetDriverVersion())
    if cuda:
        return _gpus_of_torch(cuda, amd=bool(torch.version.hip)), None
    if torch and torch.version.hip and torch.cuda.device_count():
        gaps["gpus"] = "torch has not initialized HIP in this process, and to ask would do so"
        return NOT_RECORDED, None
    return (), None


def _gpus_of_torch(cuda: Any, *, amd: bool) -> tuple[Gpu, ...]:
    """List torch's devices, once CUDA or HIP is initialized."""
    return tuple(
        Gpu(
            name=each.name,
            vendor="amd" if amd else "nvidia",
            compute_capability=None if amd else f"{each.major}.{each.minor}",
            architecture=each.gcnArchName.partition(":")[0] if amd else None,
            memory_gib=each.total_memory / GIB,
            visible=True,
        )
        for each in map(cuda.get_device_properties, range(cuda.device_count()))
    )


def _gpus_of_nvml(nvml: Any, cuda: Any, gaps: dict[str, str]) -> tuple[Gpu, ...]:
    cards: list[Card] = []
    for i in range(nvml.nvmlDeviceGetCount()):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(i)
            cards.append(Card(handle, nvml.nvmlDeviceGetUUID(handle), nvml.nvmlDeviceGetName(handle)))
        except nvml.NVMLError as error:
            gaps[f"gpus.{i}"] = scrub(f"NVML failed: {error}")
    if cuda:
        known = {card.uuid.removeprefix("GPU-"): i for i, card in enumerate(cards)}
        devices = range(cuda.device_count())
        seen = [known.get(str(cuda.get_device_properties(i).uuid), -1) for i in devices]
        if -1 in seen:
            return _gpus_of_torch(cuda, amd=False)  # slices of GPUs (MIG) have UUIDs of their own
        ours = {card: bool(cuda.memory_reserved(i)) for i, card in enumerate(seen)}
    else:
        variable = os.environ.get("CUDA_VISIBLE_DEVICES")
        if (why := _why_unknown(nvml, variable, cards)) is not None:
            gaps["gpus.visible"] = why
            return tuple(_describe(nvml, card, NOT_RECORDED, False) for card in cards)
        ours = dict.fromkeys(read_visible_devices(variable, cards), False)
    order = [*ours, *(i for i in range(len(cards)) if i not in ours)]
    return tuple(_describe(nvml, cards[i], i in ours, ours.get(i, False)) for i in order)


def _describe(nvml: Any, card: Card, visible: bool, ours: bool) -> Gpu:
    """Describe a card.

    If this process has memory there (``ours``), one of the processes is this one: in a container NVML gives
    the host's process ids.
    """

    def others(processes: Sequence[Any]) -> int:
        pids = {process.pid for process in processes}
        return len(pids) - (os.getpid() in pids or (ours and bool(pids)))

    return Gpu(
        name=card.name,
        vendor="nvidia",
        compute_capability=_ask(nvml, card, "CudaComputeCapability", lambda pair: f"{pair[0]}.{pair[1]}"),
        architecture=None,
        memory_gib=_ask(nvml, card, "MemoryInfo", lambda info: info.total / GIB),
        memory_used_gib=_ask(nvml, card, "MemoryInfo", lambda info: info.used / GIB),
        visible=visible,
        other_processes=_ask(nvml, card, "ComputeRunningProcesses", others),
    )


def _ask(nvml: Any, card: Card, what: str, convert: Callable[[Any], Any]) -> Any:
    """Return NVML's answer, converted; None if unsupported, `NOT_RECORDED` if it failed."""
    try:
        return convert(getattr(nvml, f"nvmlDeviceGet{what}")(card.handle))
    except (nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound, nvml.NVMLError_NotFound):
        return None
    except nvml.NVMLError:
        return NOT_RECORDED


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
    if any(_ask(nvml, card, "MigMode", lambda modes: bool(modes[0])) is True for card in cards):
        return "a GPU is divided into slices (MIG)"
    mixed = len({card.name for card in cards}) > 1 and os.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID"
    if mixed and variable is not None:
        return (
            "CUDA_VISIBLE_DEVICES counts GPUs of different models, the fastest first unless "
            "CUDA_DEVICE_ORDER=PCI_BUS_ID"
        )
    return None
