"""The real AcceleratorState on a machine whose GPUs are stood in for: torch's answer, and NVML's.

Accelerate asks nvidia-smi too, for a field that no driver has: it is missing here, or refuses as well.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from tests.stand_ins.nvml import Device, StandIn


def forget() -> None:
    """Accelerate's shared state is nothing again."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    PartialState._reset_state()


@contextmanager
def accelerator(precision: str | None, *devices: Device, variable: str | None = "fp8") -> Iterator[None]:
    """Make a state with ``precision`` and ACCELERATE_MIXED_PRECISION as ``variable``; torch's current device
    is the first GPU."""
    import accelerate.utils.environment as environment
    from accelerate.state import AcceleratorState
    from accelerate.utils import TorchDynamoPlugin

    first = devices[0].answers["nvmlDeviceGetCudaComputeCapability"]
    forget()
    environment.check_cuda_fp8_capability.cache_clear()
    with pytest.MonkeyPatch.context() as machine:
        if variable:
            machine.setenv("ACCELERATE_MIXED_PRECISION", variable)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "is_available", lambda: True)
            patch.setattr(torch.cuda, "get_device_capability", lambda: first)
            AcceleratorState(
                mixed_precision=precision, cpu=True, dynamo_plugin=TorchDynamoPlugin(), _from_accelerator=True
            )
        environment.check_cuda_fp8_capability.cache_clear()
        StandIn(*devices).install(machine)
        machine.setattr(torch.version, "cuda", "13.0")
        try:
            yield
        finally:
            forget()
