"""What a weight really holds: the class around it, the data inside it, its dtype and its bytes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from fp8doctor.stacks import te_private
from fp8doctor.stacks.lineage import class_name, home, lineage
from fp8doctor.stacks.looking import read
from fp8doctor.stacks.torch_private import FAKE_TENSOR, local_tensor

if TYPE_CHECKING:
    from torch import Tensor

PLAIN = ("torch.nn.parameter.Parameter", "torch.Tensor", "torch.nn.parameter.Buffer")


def local(tensor: Tensor) -> Tensor:
    """Find the tensor of this process behind a DTensor; any other tensor unchanged."""
    inner = local_tensor(tensor) if home(type(tensor)).startswith("torch.distributed") else None
    return tensor if inner is None else inner


def subclass(tensor: Tensor) -> str | None:
    """Name the class of a tensor subclass, inside a DTensor too; None for an ordinary tensor."""
    inside, outside = class_name(type(local(tensor))), class_name(type(tensor))
    return next((name for name in (inside, outside) if name not in PLAIN), None)


def stored(tensor: Tensor) -> Tensor:
    """Find the first plain tensor inside a tensor subclass, such as the float8 data of a quantized weight."""
    while True:
        inner = _inside(local(tensor))
        if not inner:
            return tensor
        tensor = inner[0]


def has_data(tensor: Tensor) -> bool:
    """Whether a tensor has numbers: those of the meta device and of FakeTensorMode have none."""
    return not tensor.is_meta and class_name(type(tensor)) != FAKE_TENSOR


def whole_size(parameter: Tensor) -> int:
    """Count the elements of a parameter, the whole of it where ZeRO-3 keeps only a part in this process."""
    whole = read(parameter, "ds_numel")
    return whole if isinstance(whole, int) else parameter.numel()


def stored_bytes(tensor: Tensor) -> int:
    """Count the bytes that a parameter occupies in this process, the scales of a quantized one included."""
    return sum(each.numel() * each.element_size() for each in plain(tensor))


def storage_bytes(tensor: Tensor) -> int:
    """Count the bytes of the storages behind a tensor of this process, which may be larger than the tensor:
    what pickling it writes."""
    return sum(each.untyped_storage().nbytes() for each in plain(tensor))


def plain(tensor: Tensor) -> Iterator[Tensor]:
    """Read the ordinary tensors that a tensor is made of in this process; an ordinary one itself."""
    tensor = local(tensor)
    inner = _inside(tensor)
    if not inner:
        yield tensor
    for each in inner:
        yield from plain(each)


def dtype_name(tensor: Tensor) -> str:
    """``bfloat16``, ``float8_e4m3fn``, ..."""
    return str(tensor.dtype).removeprefix("torch.")


def is_float8(tensor: Tensor) -> bool:
    """Whether the tensor's own dtype is one of torch's float8 types."""
    return str(tensor.dtype).startswith("torch.float8")


def _inside(tensor: Tensor) -> list[Tensor]:
    """Read the tensors that a tensor subclass is made of; empty for an ordinary one."""
    if class_name(type(tensor)) in PLAIN:
        return []
    if any(module.startswith("transformer_engine.") for module, _ in lineage(type(tensor))):
        found = (getattr(tensor, name, None) for name in te_private.DATA)
        return [each for each in found if each is not None]
    if not hasattr(type(tensor), "__tensor_flatten__"):
        return []
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    return [getattr(tensor, name) for name in names]
