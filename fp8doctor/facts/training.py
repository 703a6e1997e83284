"""The state of training around the module tree, and what one step is made of."""

from typing import Annotated, Literal

from msgspec import Meta

from fp8doctor.facts.record import NOT_RECORDED, Prose, Record


class CompileMark(Record, frozen=True, kw_only=True):
    """One place where the user asked for torch.compile."""

    name: str = NOT_RECORDED
    """Module name; the empty name is the whole model."""
    form: Literal["wrapped", "in_place", "assigned_forward", "decorated_forward", "training_step"] = (
        NOT_RECORDED
    )
    """``torch.compile(m)``, ``m.compile()``, ``m.forward = ...``, a decorated class, or the step."""
    backend: str | None = NOT_RECORDED
    """``inductor``, ``eager``, ``aot_eager``, ...; None if it cannot be read."""
    compiles: bool | None = NOT_RECORDED
    """True if a frame of this module is compiled: not where Dynamo skips all of them, as for ``m.compile()``
    on a class of torch.nn before torch 2.14, and for a ModuleList, which nobody calls. None if it cannot be
    read."""
    unused: bool = NOT_RECORDED
    """True if a script's steps ran and Dynamo compiled nothing in its process; `compiles` is then False."""


class Dynamo(Record, frozen=True, kw_only=True):
    """torch.compile's state in the inspected process."""

    disabled: bool = NOT_RECORDED
    """``torch._dynamo.config.disable`` (also what ``TORCH_COMPILE_DISABLE`` sets)."""
    frames_total: int = NOT_RECORDED
    """Frames that Dynamo tried to compile so far in this process."""
    frames_ok: int = NOT_RECORDED
    recompile_limit: int | None = NOT_RECORDED
    """Versions of a function that Dynamo keeps before it gives up; not recorded before it is imported."""


class Checkpointing(Record, frozen=True, kw_only=True):
    """One form of activation checkpointing that was found."""

    name: str = NOT_RECORDED
    """Module name of the region, or of the module that decides; the empty name is the whole model."""
    form: Literal["wrapper", "huggingface", "called_in_forward"] = NOT_RECORDED
    active: bool | None = NOT_RECORDED
    """None if only a run can tell (a call to ``checkpoint`` on some ways through ``forward``)."""
    reentrant: bool | None = NOT_RECORDED
    library: str | None = NOT_RECORDED
    """Package whose function recomputes: ``torch``, ``deepspeed``, ...; None without one such function."""
    opens_fp8_autocast: bool | None = NOT_RECORDED
    """True if a forward inside opens TE's FP8 autocast, so the recompute does; None without it."""
    fp8_autocast_around: bool = NOT_RECORDED
    """True if the forward that calls checkpoint opens that autocast and what it recomputes does not: it is
    closed again when the recompute comes. Not recorded without Transformer Engine."""


class Accelerate(Record, frozen=True, kw_only=True):
    """Accelerate's shared state, read through ``sys.modules`` without creating it."""

    mixed_precision: str | None = NOT_RECORDED
    distributed: str | None = NOT_RECORDED
    prepared: bool = NOT_RECORDED
    """True if this model went through ``prepare``."""
    may_prepare: bool = NOT_RECORDED
    """True if an Accelerator is alive that has prepared nothing yet, so that this model may be next. The
    state outlives the Accelerator and does not say which model it was made for."""


class Distributed(Record, frozen=True, kw_only=True):
    """torch.distributed in this process, and what FSDP2 shards of the model."""

    world_size: int = NOT_RECORDED
    fsdp2_linears: tuple[str, ...] = NOT_RECORDED
    """Names of the linear-like modules whose weight FSDP2 shards."""
    shards: int | None = NOT_RECORDED
    """Processes over which their weights are cut, the most of any; None if FSDP2 shards none."""
    backend: str | None = NOT_RECORDED
    """Of the default process group: ``nccl``, ``cpu:gloo,cuda:nccl``, ...; None if it cannot be read."""
    wrapper: Literal["DDP", "FSDP1", "FSDP2"] | None = NOT_RECORDED
    """The outermost wrapper that keeps the processes' weights in sync; None without one."""
    wrapper_at: str | None = NOT_RECORDED
    """Name of the module that it is around; the empty name is the whole model. None without one."""
    amax_ranks: int | None = NOT_RECORDED
    """Processes over which delayed scaling of Transformer Engine reduces amax; None if no layer does."""
    optimize_ddp: bool | None = NOT_RECORDED
    """``torch._dynamo.config.optimize_ddp``: cut graphs at DDP's buckets; None before Dynamo's import."""


class TrainerArguments(Record, frozen=True, kw_only=True):
    """The settings of a Trainer, or of TrainingArguments in the model file."""

    kind: str = NOT_RECORDED
    """Qualified class: ``transformers.training_args.TrainingArguments``, ``trl...SFTConfig``, ..."""
    bf16: bool | None = NOT_RECORDED
    fp16: bool | None = NOT_RECORDED
    mixed_precision: str | None = NOT_RECORDED
    checkpointing: bool | None = NOT_RECORDED

    def call(self, settings: str) -> str:
        """Write these settings as arguments of its class."""
        return f"{self.get('kind', 'TrainingArguments').rpartition('.')[2]}(..., {settings})"


class Conversion(Record, frozen=True, kw_only=True):
    """Losses of a model file that replaced a Linear by an FP8 layer, after loading."""

    linears: int = NOT_RECORDED
    """FP8 layers in the model that took the place of a Linear."""
    without_hooks: tuple[str, ...] = NOT_RECORDED
    """Layers whose predecessor had forward or backward hooks; they have none."""
    without_forward: tuple[str, ...] = NOT_RECORDED
    """Layers whose predecessor had a forward of its own; they do not run it."""
    bypassed: tuple[str, ...] = NOT_RECORDED
    """Layers inside a ``torch.compile`` wrapper that was made around the predecessor, and calls it still."""
    unfrozen: tuple[str, ...] = NOT_RECORDED
    """Layers that are trainable and whose predecessor was frozen."""
    untied: tuple[tuple[str, str], ...] = NOT_RECORDED
    """Weight of a layer -> the parameter that its predecessor's weight still is."""


class Converter(Record, frozen=True, kw_only=True):
    """Calls of torchao's ``convert_to_float8_training``."""

    called: bool | None = NOT_RECORDED
    """True if it was called while someone watched; None if no call left a trace, or none was watched."""
    replaced: int | None = NOT_RECORDED
    """FP8 layers that took the place of a Linear in any model meanwhile; None if nobody watched."""


class Training(Record, frozen=True, kw_only=True):
    """The state of training around the module tree."""

    autocast: str | None = NOT_RECORDED
    """Dtype of the step's autocast; None without one. Not recorded of a script without a seen call."""
    autocast_within: bool = NOT_RECORDED
    """True if the training step or a forward of the user's own opens an autocast. Not recorded if its code
    names one and no forward was seen."""
    fp8_autocast: bool | None = NOT_RECORDED
    """True if the step opens an FP8 autocast; None without layers of Transformer Engine. Not recorded if no
    forward was seen, nor without a training step of the user's unless its forward opens one."""
    gradients_seen: bool = NOT_RECORDED
    """True if a parameter holds a gradient, which proves that a training step ran."""
    optimizer_stepped: bool | None = NOT_RECORDED
    """True if the optimizer holds state, which proves that it took a step; None without an optimizer."""
    compile_marks: tuple[CompileMark, ...] = NOT_RECORDED
    dynamo: Dynamo = NOT_RECORDED
    checkpointing: tuple[Checkpointing, ...] = NOT_RECORDED
    forward_chain: tuple[str, ...] = NOT_RECORDED
    """Qualified names of the wrappers around the root's forward, outermost first."""
    accelerate: Accelerate | None = NOT_RECORDED
    distributed: Distributed | None = NOT_RECORDED
    """None if torch.distributed is not initialized in this process."""
    trainer: TrainerArguments | None = NOT_RECORDED
    optimizer: str | None = NOT_RECORDED
    """Qualified class of the optimizer; None if none was given."""
    use_cache: bool | None = NOT_RECORDED
    """True if a transformers model builds a KV cache in every training forward; None if it never does."""
    cache_switch: str | None = NOT_RECORDED
    """Outermost module whose ``config.use_cache`` asks for it, in force or not; None if none does."""
    cache_holder: str | None = NOT_RECORDED
    """Name of the innermost module that makes it, whose blocks fill it; None if none asks."""
    alloc_retries: int | None = NOT_RECORDED
    """Times CUDA's allocator freed its cache to try again in this process; None without CUDA in use."""
    layerdrop: float | None = NOT_RECORDED
    """Largest probability to skip a block in training (LayerDrop); None if no module is known to."""
    parameters_outside_optimizer: int | None = NOT_RECORDED
    """Trainable parameter tensors in no optimizer group; None without an optimizer."""
    first_outside_optimizer: tuple[str, ...] = NOT_RECORDED
    """Names of the first few of them."""
    first_microbatch: tuple[bool, ...] = NOT_RECORDED
    """``is_first_microbatch`` in the calls of one module of Transformer Engine, in the watched micro-batches;
    empty if no call had it."""
    conversion: Conversion | None = NOT_RECORDED
    """None if nobody watched: only a model file that the worker loads converts under the doctor's eyes."""
    converter: Converter = NOT_RECORDED


class Workload(Record, frozen=True, kw_only=True):
    """The parts of a step, each ``given`` by the user or ``made up`` here."""

    batch_source: Literal["given", "made up"] | None = NOT_RECORDED
    """None if no batch could be made."""
    batch_size: int | None = NOT_RECORDED
    sequence_length: int | None = NOT_RECORDED
    tokens: int | None = NOT_RECORDED
    """Rows of the matmuls in one micro-batch (M): batch x sequence, or the batch if there is no sequence."""
    rows: dict[str, tuple[int, ...]] = NOT_RECORDED
    """Linear -> rows that it multiplies in each of its calls in one forward of a micro-batch; if a weight
    holds many experts, those of each. Those that the forward does not call are left out."""
    refused: Prose = NOT_RECORDED
    """Layer, and what torch says of its product with this batch; not recorded if it takes it."""
    note: Prose | None = NOT_RECORDED
    """How a synthetic batch was made."""
    loss_source: Literal["given", "output.loss", "mean"] = NOT_RECORDED
    optimizer_source: Literal["given", "made up"] = NOT_RECORDED
    autocast_source: Literal["given", "none"] = NOT_RECORDED
    accumulate: Annotated[int, Meta(ge=1)] = NOT_RECORDED
