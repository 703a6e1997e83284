"""GPUs that this machine does not have, told by a stand-in NVML to the real `examine_gpus`."""

import os
from types import SimpleNamespace

import pynvml
import pytest
import torch

from fp8doctor.examine.nvml_gpus import examine_gpus
from fp8doctor.facts import NOT_RECORDED, Gpu, recorded
from tests.stand_ins.nvml import GIB, Device, StandIn, a100, gpu, h100


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.delenv(name, raising=False)


def examined(
    monkeypatch: pytest.MonkeyPatch, *devices: Device, **stand_in: object
) -> tuple[tuple[Gpu, ...], dict[str, str]]:
    """What `examine_gpus` makes of these devices, and its gaps; NVML has to be shut down again."""
    nvml = StandIn(*devices, **stand_in).install(monkeypatch)  # type: ignore[arg-type]
    gaps: dict[str, str] = {}
    gpus, _ = examine_gpus(gaps)
    assert nvml.opened == 0
    return gpus, gaps


def initialized(monkeypatch: pytest.MonkeyPatch, *devices: SimpleNamespace, reserved: int = 0) -> None:
    """torch as it is once CUDA was used: these are the properties of the devices it sees."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(devices))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: devices[i])
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda i: reserved)


def process(pid: int) -> SimpleNamespace:
    return SimpleNamespace(pid=pid, usedGpuMemory=GIB)


def test_everything_of_one_gpu_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    (found,), gaps = examined(monkeypatch, a100())
    assert found == Gpu(
        name="NVIDIA A100-SXM4-80GB",
        vendor="nvidia",
        compute_capability="8.0",
        architecture=None,
        memory_gib=80.0,
        memory_used_gib=0.5,
        visible=True,
        other_processes=0,
    )
    assert gaps == {}


def test_what_a_gpu_cannot_tell_is_none_and_what_failed_is_not_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bare = Device(
        "GPU-d0000000",
        "NVIDIA GB10",
        {
            "nvmlDeviceGetCudaComputeCapability": (12, 1),
            "nvmlDeviceGetMemoryInfo": pynvml.NVMLError_Unknown(),
        },
    )
    (found,), gaps = examined(monkeypatch, bare)
    assert (found.name, found.compute_capability) == ("NVIDIA GB10", "12.1")
    assert found.other_processes is None
    assert not recorded(found, "memory_gib")
    assert gaps == {}


def test_without_a_driver_there_is_no_gpu_and_no_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (pynvml.NVMLError_LibraryNotFound(), pynvml.NVMLError_DriverNotLoaded()):
        assert examined(monkeypatch, on_init=error) == ((), {})


def test_a_broken_driver_leaves_the_gpus_unrecorded_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus, gaps = examined(monkeypatch, on_init=pynvml.NVMLError_LibRmVersionMismatch())
    assert gpus is NOT_RECORDED
    assert gaps["gpus"] == "the GPUs cannot be asked: RM has detected an NVML/RM version mismatch."


def test_a_gpu_that_fell_off_the_bus_is_left_out_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = Device("GPU-e0000000", pynvml.NVMLError_GpuIsLost())
    gpus, gaps = examined(monkeypatch, h100(), lost)
    assert [found.name for found in gpus] == ["NVIDIA H100 80GB HBM3"]
    assert gaps == {"gpus.1": "NVML failed: GPU is lost"}


# Which of them the process sees


PAIR = ("GPU-a1000000-0000-0000-0000-000000000000", "GPU-b1000000-0000-0000-0000-000000000000")

SEEN = {
    "0": "1",
    "1,0": "21",
    "0,-1,1": "1",
    "0,7,1": "1",
    " 1": "2",
    "GPU-b1": "2",
    f"{PAIR[1]},{PAIR[0]}": "21",
    "GPU-b1,0": "21",
    **dict.fromkeys(("", "-1", "7", "0,0", "none", "GPU-", "MIG-1"), ""),
}
"""The variable, and the GPUs that it shows, in order."""


@pytest.mark.parametrize("variable", SEEN)
def test_the_variable_chooses_and_orders(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    pair = (gpu("NVIDIA H100", uuid, (9, 0), memory) for uuid, memory in zip(PAIR, (1, 2), strict=True))
    gpus, gaps = examined(monkeypatch, *pair)
    assert "".join(f"{found.memory_gib:.0f}" for found in gpus if found.visible) == SEEN[variable]
    assert len(gpus) == 2
    assert [found.visible for found in gpus] == sorted((found.visible for found in gpus), reverse=True)
    assert gaps == {}


def test_indices_among_different_models_need_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    gpus, gaps = examined(monkeypatch, a100(), h100())
    assert [found.name for found in gpus] == ["NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3"]
    assert not any(recorded(found, "visible") for found in gpus)
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in gaps["gpus.visible"]
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    gpus, gaps = examined(monkeypatch, a100(), h100())
    assert [(found.compute_capability, found.visible) for found in gpus] == [("8.0", True), ("9.0", False)]
    assert gaps == {}


def test_once_cuda_is_initialized_torch_says_what_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")  # changed after CUDA was initialized: too late to count
    initialized(monkeypatch, SimpleNamespace(uuid=PAIR[1].removeprefix("GPU-")))
    gpus, gaps = examined(monkeypatch, a100(), h100())
    assert [(found.name, found.visible) for found in gpus] == [
        ("NVIDIA H100 80GB HBM3", True),
        ("NVIDIA A100-SXM4-80GB", False),
    ]
    assert gaps == {}


def test_slices_of_a_gpu_are_known_once_cuda_is_initialized(monkeypatch: pytest.MonkeyPatch) -> None:
    divided = h100(nvmlDeviceGetMigMode=(1, 1))
    (found,), gaps = examined(monkeypatch, divided)
    assert not recorded(found, "visible")
    assert "MIG" in gaps["gpus.visible"]
    properties = {"name": "MIG 1g.10gb", "total_memory": 10 * GIB, "major": 9, "minor": 0}
    initialized(monkeypatch, SimpleNamespace(uuid="c0000000-0000-0000-0000-000000000000", **properties))
    (found,), gaps = examined(monkeypatch, divided)
    assert (found.memory_gib, found.visible, gaps) == (10.0, True, {})


# Who else is there


def test_this_process_is_not_counted_among_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    own = [process(each) for each in (os.getpid(), 1, 1, 2)]
    (found,), _ = examined(monkeypatch, h100(nvmlDeviceGetComputeRunningProcesses=own))
    assert found.other_processes == 2


def test_in_a_container_one_of_them_is_this_process_if_it_holds_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    strangers = [process(2**22 + 1), process(2**22 + 2)]
    device = h100(nvmlDeviceGetComputeRunningProcesses=strangers)
    (found,), _ = examined(monkeypatch, device)
    assert found.other_processes == 2
    initialized(monkeypatch, SimpleNamespace(uuid=device.uuid.removeprefix("GPU-")), reserved=GIB)
    (found,), _ = examined(monkeypatch, device)
    assert found.other_processes == 1


# Without NVML


def test_amd_is_read_from_torch_once_it_is_initialized(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4.43482")
    card = {"name": "AMD Instinct MI300X", "total_memory": 192 * GIB, "gcnArchName": "gfx942:sramecc+:xnack-"}
    initialized(monkeypatch, SimpleNamespace(**card))
    gaps: dict[str, str] = {}
    (found,), _ = examine_gpus(gaps)
    assert (found.name, found.vendor, found.architecture) == ("AMD Instinct MI300X", "amd", "gfx942")
    assert (found.compute_capability, found.memory_gib, found.visible) == (None, 192.0, True)
    assert gaps == {}
