"""How the job is to be trained: batch, parallelism, optimizer, LoRA."""

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from fp8doctor.diagnosis.document import read_saved
from fp8doctor.errors import UserError
from fp8doctor.facts import Facts, Record


class Optimizer(NamedTuple):
    """Bytes per trained parameter."""

    gradient: float
    state: float
    moved: float
    """Read and written by one step: gradient, state and weight."""


OPTIMIZERS = {
    "adamw": Optimizer(2, 4, 14),
    "adamw-fp32": Optimizer(4, 12, 30),
    "adamw-master": Optimizer(2, 12, 28),
    "adamw-8bit": Optimizer(2, 2, 10),
    "sgd": Optimizer(2, 0, 6),
}
"""Name -> bytes, of weights in 16 bits. adamw-fp32 keeps fp32 gradients, master weights and moments, as
Megatron; so does, in sum, FSDP2 with mixed precision. adamw-master keeps gradients in BF16, as DeepSpeed, and
Megatron without ``grad_reduce_in_fp32``."""

STACKS = {"torchao": "torchao", "te": "transformer_engine"}
"""Name on the command line -> name in `fp8doctor.recipes`."""

Count = Annotated[int, msgspec.Meta(ge=1)]


class Options(Record, frozen=True, kw_only=True):
    """One training job, as asked for. Batch and rows are those of one data-parallel rank."""

    batch: Count = 1
    seq: Count = 4096
    dp: Count = 1
    tp: Count = 1
    cp: Count = 1
    pp: Count = 1
    ep: Count = 1
    """Ranks that divide the experts; they are among those of dp and cp."""
    accumulate: Count = 1
    """Micro-batches per step."""
    sharding: Literal["fsdp", "zero1", "ddp"] = "fsdp"
    """What the data-parallel ranks share: weights, gradients and optimizer; only the optimizer; nothing."""
    checkpointing: Literal["none", "selective", "full"] = "none"
    """``selective`` repeats every second matmul and what lies between, as torchtitan's per-op policy."""
    fused_loss: bool = False
    """The loss takes the logits in chunks and keeps none of them, as Liger Kernel's."""
    lora: Count | None = None
    """Rank of the adapters."""
    lora_modules: tuple[str, ...] = ()
    """Last parts of the names of the layers that get them; empty for all in the blocks."""
    optimizer: Literal["adamw", "adamw-fp32", "adamw-master", "adamw-8bit", "sgd"] = "adamw"
    stack: Literal["torchao", "te"] | None = None
    """None for both."""
    recipe: str = "all"
    step_ms: Annotated[float, msgspec.Meta(gt=0)] | None = None
    """A measured BF16 step on the first GPU, which all times are scaled to."""

    @property
    def gpus(self) -> int:
        return self.dp * self.tp * self.cp * self.pp

    @property
    def ranks(self) -> int:
        """Count the GPUs with other data, or another part of a sequence."""
        return self.dp * self.cp

    @property
    def tokens(self) -> int:
        """Count the rows of one micro-batch on one GPU."""
        return self.batch * self.seq // self.cp


def options_for(facts: Facts, given: Mapping[str, Any]) -> Options:
    """Complete the options that were given by the batch of the facts."""
    workload = {
        "batch": facts.get("workload.batch_size"),
        "seq": facts.get("workload.sequence_length"),
        "accumulate": facts.get("workload.accumulate"),
    }
    found = {name: value for name, value in workload.items() if value}
    if any(each.get("checkpointed") is not None for each in facts.network.linears):
        found["checkpointing"] = "full"
    if "seq" not in found and (tokens := facts.get("workload.tokens")):
        found["seq"] = tokens // found.get("batch", 1)
    found |= {name: value for name, value in given.items() if value is not None}
    try:
        return msgspec.convert(found, Options)
    except msgspec.ValidationError as error:
        raise UserError(f"these options cannot be planned: {error}") from None


def saved_facts(path: Path) -> Facts | None:
    """Read the facts of a saved report; None for another file. Raises `UserError` for a broken report."""
    if path.suffix not in (".json", ".gz") or not path.is_file():
        return None
    with contextlib.suppress(OSError):
        content = path.read_bytes()
        if path.suffix == ".gz" or (b'"facts"' in content and b'"schema_version"' in content):
            return read_saved(path)[0]
    return None
