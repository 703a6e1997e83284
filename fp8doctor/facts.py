"""The facts: what was observed, as plain frozen records without a single torch object.

Every field defaults to `NOT_RECORDED`: nobody looked, the library could not tell, or the recording is older than the
field. A check that needs it then says "unknown". ``None`` and empty tuples mean the opposite: looked, and none is there.
Units stand in the names: ``_gib``, ``_ms``, ``_pct``, ``_mhz``, ``_w``.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from fp8doctor.record import NOT_RECORDED, Record, from_builtins, restore_unknown_keys, to_builtins, unknown_keys

Use = Literal["training", "storage", "none"]
"""What a stack does with a layer: FP8 GEMMs in training; FP8 (or other) weights only; nothing, a 16- or 32-bit layer."""


class Target(Record, frozen=True, kw_only=True):
    """What was inspected. No folder is recorded, only the name the user would recognise."""

    kind: Literal["file", "module", "live", "environment"] = NOT_RECORDED
    name: str = NOT_RECORDED
    """File name, module name, or the class name of a live model."""
    attribute: str | None = NOT_RECORDED
    """The name in the file that gave the model (``build_model``, ``model``, ...)."""
    layers: int | None = NOT_RECORDED
    """Layers that ``--layers`` asked for, which makes it a cut of the user's model; None when it is whole."""


class Package(Record, frozen=True, kw_only=True):
    """An installed distribution."""

    version: str | None = NOT_RECORDED
    """None when the package can be found but its metadata cannot."""
    imported: bool = NOT_RECORDED
    """Whether the inspected process had imported it."""


class Software(Record, frozen=True, kw_only=True):
    """Versions of everything that decides whether FP8 runs. ``None`` means not installed or not built in."""

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
    torchao_libraries: int | None = NOT_RECORDED
    """Compiled libraries of torchao that are loaded; None when torchao is not imported, or brings none."""


class Environment(Record, frozen=True, kw_only=True):
    """Environment variables on the allow-list of `fp8doctor.examine.environment`, and what they point at."""

    variables: dict[str, str] = NOT_RECORDED
    deepspeed_fp8_section: bool | None = NOT_RECORDED
    """Whether the DeepSpeed configuration in use has an ``"fp8"`` section; None when there is no such configuration."""
    backend_imports: dict[str, str | None] = NOT_RECORDED
    """FP8 backend that Accelerate will import (TE, AO, MSAMP) -> why a fresh process cannot import it, None when it can or
    this process has. Empty when nothing asks for FP8 through Accelerate, or there is no backend to take."""
    debug_switches: dict[str, bool] = NOT_RECORDED
    """Switches of this process that are set by a call: ``anomaly_detection``, ``deterministic_algorithms``,
    ``fill_uninitialized_memory``, ``nvdlfw_inspect`` (Transformer Engine's debug tool, initialized)."""


class Gpu(Record, frozen=True, kw_only=True):
    """One GPU as NVML (or torch, on AMD) describes it, in the order the process sees them."""

    name: str = NOT_RECORDED
    vendor: Literal["nvidia", "amd"] = NOT_RECORDED
    compute_capability: str | None = NOT_RECORDED
    """``major.minor``, such as ``9.0``; None on AMD."""
    architecture: str | None = NOT_RECORDED
    """AMD's ``gcnArchName`` (``gfx942``); None on NVIDIA."""
    memory_gib: float | None = NOT_RECORDED
    memory_used_gib: float | None = NOT_RECORDED
    visible: bool = NOT_RECORDED
    """Whether ``CUDA_VISIBLE_DEVICES`` leaves it to this process."""
    mig: bool | None = NOT_RECORDED
    """Whether MIG mode is on, so that only a slice of the GPU may be there."""
    sm_clock_mhz: int | None = NOT_RECORDED
    sm_clock_max_mhz: int | None = NOT_RECORDED
    power_limit_w: float | None = NOT_RECORDED
    power_limit_default_w: float | None = NOT_RECORDED
    throttle_reasons: tuple[str, ...] = NOT_RECORDED
    """Why NVML says that clocks are held back at the moment of examining; idle is not a reason."""
    other_processes: int | None = NOT_RECORDED
    """Compute processes on this GPU besides the inspected one."""


class Linear(Record, frozen=True, kw_only=True):
    """One linear-like layer: a module, a functional projection, or a 3-D expert weight."""

    name: str = NOT_RECORDED
    """Fully qualified name in the model, wrappers such as ``_orig_mod`` taken out."""
    kind: str = NOT_RECORDED
    """Qualified class name, such as ``torchao.float8.float8_linear.Float8Linear``."""
    stack: str = NOT_RECORDED
    """The stack that recognised it (`fp8doctor.stacks`); ``torch`` for ordinary layers."""
    use: Use = NOT_RECORDED
    recipe: str | None = NOT_RECORDED
    """Scaling recipe read back from its configuration: tensorwise, rowwise, rowwise_with_gw_hp, mxfp8, delayed, ..."""
    features: dict[str, bool | int | str | None] = NOT_RECORDED
    """Settings of the stack that change the cost, such as ``emulate`` and ``pad_inner_dim``."""
    engaged: bool | None = NOT_RECORDED
    """Whether its last training forward ran in FP8; None where the stack keeps no such record or none was run."""
    in_features: int = NOT_RECORDED
    out_features: int = NOT_RECORDED
    gemms: int = NOT_RECORDED
    """GEMMs of this shape in one forward: 2 in a fused MLP with equal shapes, the number of experts in a 3-D weight."""
    bias: bool = NOT_RECORDED
    dtype: str = NOT_RECORDED
    """Logical dtype of the weight, such as ``bfloat16``; of the stored data for FP8 weights."""
    weight_class: str | None = NOT_RECORDED
    """Qualified class of a tensor subclass that holds the weight; None for an ordinary Parameter."""
    requires_grad: bool = NOT_RECORDED
    role: Literal["body", "head", "router", "experts"] = NOT_RECORDED
    adapter: Literal["base", "adapter"] | None = NOT_RECORDED
    """With LoRA: the frozen base layer, or one of the low-rank matrices. None without."""
    compiled: str | None = NOT_RECORDED
    """Name of the compile mark that covers it (the empty name is the whole model); None when it runs eagerly."""
    checkpointed: str | None = NOT_RECORDED
    """Name of the checkpointed region that covers it; None when its activations are kept."""
    parameters: int = NOT_RECORDED
    parameter_share_pct: float | None = NOT_RECORDED
    flops_per_token: float | None = NOT_RECORDED
    """GEMM FLOPs of forward and backward for one token: 2·K·N each for output, input gradient and, when the weight is
    trained, weight gradient; expert weights scaled by the experts a token visits."""
    flops_share_pct: float | None = NOT_RECORDED


class Blocks(Record, frozen=True, kw_only=True):
    """A list of repeated blocks, such as the decoder layers."""

    name: str = NOT_RECORDED
    kind: str = NOT_RECORDED
    container: Literal["list", "ModuleDict"] = NOT_RECORDED
    """``list`` for a ModuleList or Sequential, iterated as it is; the blocks of a ModuleDict are its ``values()``."""
    forward_of_torch: bool = NOT_RECORDED
    """Whether their forward is torch.nn's own, inherited or not, which `CompileMark.compiles` depends on."""
    count: int = NOT_RECORDED
    compiled: int = NOT_RECORDED
    """Blocks that are covered by a compile mark, their own or one above."""
    checkpointed: int = NOT_RECORDED
    linears: int = NOT_RECORDED
    """Linear-like layers in all of them together."""


class Scaling(Record, frozen=True, kw_only=True):
    """One way in which FP8 layers of the model are scaled, read back from their configuration."""

    stack: str = NOT_RECORDED
    layers: int = NOT_RECORDED
    first: str = NOT_RECORDED
    """Name of the first of these layers."""
    forward_dtypes: tuple[str, ...] = NOT_RECORDED
    """Float8 dtypes of input and weight in the forward GEMM, each once, such as ``float8_e4m3fn``."""
    amax_history_len: int | None = NOT_RECORDED
    """Steps that delayed scaling looks back over; None for every other scaling."""
    amax_compute_algo: str | None = NOT_RECORDED
    """``max`` or ``most_recent`` over that history; ``custom`` for a function; None for every other scaling."""


class Network(Record, frozen=True, kw_only=True):
    """The module tree."""

    kind: str = NOT_RECORDED
    """Qualified class of the root, wrappers taken off."""
    forward_of_torch: bool = NOT_RECORDED
    """Whether its forward is torch.nn's own, inherited or not."""
    parameters: int = NOT_RECORDED
    """Elements of all parameters, a shared one counted once."""
    trainable_parameters: int = NOT_RECORDED
    adapter_parameters: int = NOT_RECORDED
    parameter_gib: float | None = NOT_RECORDED
    dtypes: dict[str, int] = NOT_RECORDED
    """Elements of the parameters by dtype."""
    devices: tuple[str, ...] = NOT_RECORDED
    """Device types of parameters and buffers: ``cuda``, ``cpu``, ``meta``."""
    modules: int = NOT_RECORDED
    linears: tuple[Linear, ...] = NOT_RECORDED
    blocks: tuple[Blocks, ...] = NOT_RECORDED
    embeddings: int = NOT_RECORDED
    norms: int = NOT_RECORDED
    ties: tuple[tuple[str, ...], ...] = NOT_RECORDED
    """Groups of parameter names that share one Parameter."""
    broken_ties: tuple[tuple[str, str], ...] = NOT_RECORDED
    """Pairs of parameter names that the model declares as tied (transformers) and that are two Parameters."""
    quantization: str | None = NOT_RECORDED
    """``quant_method`` of the model's configuration: ``bitsandbytes``, ``gptq``, ``fp8``, ...; None without one."""
    hooks: int = NOT_RECORDED
    """Forward and backward hooks on all modules together."""
    float8_parameters: int = NOT_RECORDED
    """Parameters whose own dtype is one of torch's float8 types, in any module."""
    wrappers: tuple[str, ...] = NOT_RECORDED
    """Classes that wrap the root, outermost first: OptimizedModule, DistributedDataParallel, ..."""
    vocabulary: int | None = NOT_RECORDED
    hidden_size: int | None = NOT_RECORDED
    configured_name: str | None = NOT_RECORDED
    """Last part of the name or path in the model's configuration, such as ``Llama-3.1-8B``; None without one."""
    scalings: tuple[Scaling, ...] = NOT_RECORDED
    """How the FP8 layers scale; those whose library keeps no such record, and TE's before a forward, are left out."""


class CompileMark(Record, frozen=True, kw_only=True):
    """One place where the user asked for torch.compile."""

    name: str = NOT_RECORDED
    """Module name; the empty name is the whole model."""
    form: Literal["wrapped", "in_place", "assigned_forward", "decorated_forward", "training_step"] = NOT_RECORDED
    """``torch.compile(m)``, ``m.compile()``, ``m.forward = torch.compile(m.forward)``, a decorated class, or the step."""
    backend: str | None = NOT_RECORDED
    """``inductor``, ``eager``, ``aot_eager``, ...; None when it cannot be read."""
    compiles: bool | None = NOT_RECORDED
    """Whether a frame of this module is compiled: not where Dynamo skips all of them, as for ``m.compile()`` on a class of
    torch.nn before torch 2.15, and for a ModuleList, which nobody calls. None when it cannot be read."""


class Dynamo(Record, frozen=True, kw_only=True):
    """torch.compile's state in the inspected process."""

    disabled: bool = NOT_RECORDED
    """``torch._dynamo.config.disable`` (also what ``TORCH_COMPILE_DISABLE`` sets)."""
    suppress_errors: bool = NOT_RECORDED
    stance: str = NOT_RECORDED
    """``default``, ``force_eager``, ... as set by ``torch.compiler.set_stance``."""
    frames_total: int = NOT_RECORDED
    """Frames that Dynamo tried to compile so far in this process."""
    frames_ok: int = NOT_RECORDED
    failures: tuple[str, ...] = NOT_RECORDED
    """Reasons of compilations that failed, scrubbed, at most a few."""
    recompile_limit: int | None = NOT_RECORDED
    """Versions of one function that Dynamo keeps before it leaves the function eager; not recorded before it is imported."""


class Checkpointing(Record, frozen=True, kw_only=True):
    """One form of activation checkpointing that was found."""

    name: str = NOT_RECORDED
    """Module name of the region, or of the module that decides; the empty name is the whole model."""
    form: Literal["wrapper", "huggingface", "unsloth", "called_in_forward", "compiler_budget", "offload"] = NOT_RECORDED
    active: bool | None = NOT_RECORDED
    """None when only a run can tell (a call to ``checkpoint`` inside ``forward``)."""
    reentrant: bool | None = NOT_RECORDED
    library: str | None = NOT_RECORDED
    """Package whose function recomputes: ``torch``, ``transformer_engine``, ``deepspeed``, ...; None where there is no one function."""
    opens_fp8_autocast: bool | None = NOT_RECORDED
    """Whether a forward inside the region opens Transformer Engine's autocast, so that the recompute does too; None without it."""


class Accelerate(Record, frozen=True, kw_only=True):
    """What Accelerate's shared state says, read through ``sys.modules`` without creating it."""

    mixed_precision: str | None = NOT_RECORDED
    distributed: str | None = NOT_RECORDED
    dynamo_backend: str | None = NOT_RECORDED
    prepared: bool = NOT_RECORDED
    """Whether this model went through ``prepare``."""
    te_autocast: bool = NOT_RECORDED
    """Whether ``prepare`` wrapped a forward of this model in Transformer Engine's FP8 autocast."""


class Distributed(Record, frozen=True, kw_only=True):
    """torch.distributed in this process, and what FSDP2 shards of the model."""

    world_size: int = NOT_RECORDED
    fsdp2_linears: tuple[str, ...] = NOT_RECORDED
    """Names of the linear-like modules whose weight FSDP2 shards."""
    shards: int | None = NOT_RECORDED
    """Processes over which their weights are cut, the most of any; None when FSDP2 shards none."""


class TrainerArguments(Record, frozen=True, kw_only=True):
    """What a transformers Trainer, or TrainingArguments in the model file, ask for."""

    kind: str = NOT_RECORDED
    """Qualified class: ``transformers.training_args.TrainingArguments``, ``trl...SFTConfig``, ..."""
    bf16: bool | None = NOT_RECORDED
    fp16: bool | None = NOT_RECORDED
    mixed_precision: str | None = NOT_RECORDED
    torch_compile: bool | None = NOT_RECORDED
    checkpointing: bool | None = NOT_RECORDED


class Conversion(Record, frozen=True, kw_only=True):
    """What was lost where the model file put an FP8 layer in the place of a Linear, as it stands when all is loaded."""

    linears: int = NOT_RECORDED
    """FP8 layers in the model that took the place of a Linear."""
    without_hooks: tuple[str, ...] = NOT_RECORDED
    """Layers whose predecessor had forward or backward hooks; they have none."""
    without_forward: tuple[str, ...] = NOT_RECORDED
    """Layers whose predecessor had a forward of its own; they do not run it."""
    lost_forwards: tuple[str, ...] = NOT_RECORDED
    """Qualified classes of those predecessors, each once."""
    without_compile: tuple[str, ...] = NOT_RECORDED
    """Layers whose predecessor was compiled; neither they nor a module above them is."""
    bypassed: tuple[str, ...] = NOT_RECORDED
    """Layers inside a ``torch.compile`` wrapper that was made around the predecessor, and calls it still."""
    unfrozen: tuple[str, ...] = NOT_RECORDED
    """Layers that are trainable and whose predecessor was frozen."""
    untied: tuple[tuple[str, str], ...] = NOT_RECORDED
    """Weight of a layer -> the parameter that its predecessor's weight still is."""


class Training(Record, frozen=True, kw_only=True):
    """The state of training around the module tree."""

    mode: Literal["train", "eval"] = NOT_RECORDED
    autocast: str | None = NOT_RECORDED
    """Dtype of the autocast the step runs under; None without autocast."""
    autocast_within: bool = NOT_RECORDED
    """Whether the training step or a forward of the user's own opens an autocast, which only a run could look into."""
    gradients_seen: bool = NOT_RECORDED
    """Whether a parameter holds a gradient, which proves that a training step ran."""
    optimizer_stepped: bool | None = NOT_RECORDED
    """Whether the optimizer holds state, which proves that it took a step; None without an optimizer."""
    compile_marks: tuple[CompileMark, ...] = NOT_RECORDED
    compiled_elsewhere: tuple[str, ...] = NOT_RECORDED
    """Names in the model file that hold a compiled wrapper of this very model, which is not the one inspected."""
    dynamo: Dynamo = NOT_RECORDED
    checkpointing: tuple[Checkpointing, ...] = NOT_RECORDED
    forward_chain: tuple[str, ...] = NOT_RECORDED
    """Qualified names of the wrappers around the root's forward, outermost first."""
    accelerate: Accelerate | None = NOT_RECORDED
    distributed: Distributed | None = NOT_RECORDED
    """None when torch.distributed is not initialized in this process."""
    trainer: TrainerArguments | None = NOT_RECORDED
    optimizer: str | None = NOT_RECORDED
    """Qualified class of the optimizer; None when none was given."""
    use_cache: bool | None = NOT_RECORDED
    """Whether a transformers model builds a KV cache in every training forward with labels; None for models that never do."""
    cache_switch: str | None = NOT_RECORDED
    """Name of the outermost module whose ``config.use_cache`` asks for that cache, in force or held off by checkpointing; None
    when none asks."""
    alloc_retries: int | None = NOT_RECORDED
    """Times CUDA's allocator had to free its cache and try again in this process so far; None without CUDA in use."""
    parameters_outside_optimizer: int | None = NOT_RECORDED
    """Trainable parameter tensors in no optimizer group; None without an optimizer."""
    first_outside_optimizer: tuple[str, ...] = NOT_RECORDED
    """Names of the first few of them."""
    conversion: Conversion | None = NOT_RECORDED
    """None when nobody watched: only a model file that the worker loads converts under the doctor's eyes."""


class Workload(Record, frozen=True, kw_only=True):
    """What one step is made of, and where each part came from: ``given`` by the user or ``made up`` here."""

    batch_source: Literal["given", "made up"] | None = NOT_RECORDED
    """None when no batch could be made."""
    batch_size: int | None = NOT_RECORDED
    sequence_length: int | None = NOT_RECORDED
    tokens: int | None = NOT_RECORDED
    """Rows of the GEMMs in one micro-batch (M): batch × sequence, or the batch where there is no sequence."""
    note: str | None = NOT_RECORDED
    """How a made-up batch was made."""
    loss_source: Literal["given", "output.loss", "mean"] = NOT_RECORDED
    optimizer_source: Literal["given", "made up"] = NOT_RECORDED
    autocast_source: Literal["given", "none"] = NOT_RECORDED
    accumulate: int = NOT_RECORDED


class ArmCut(Record, frozen=True, kw_only=True):
    """One arm at one cut of the model."""

    blocks: dict[str, int] = NOT_RECORDED
    """List of blocks -> how many were kept; empty when the model was measured whole."""
    step_ms: float | None = NOT_RECORDED
    low_ms: float | None = NOT_RECORDED
    high_ms: float | None = NOT_RECORDED
    peak_gib: float | None = NOT_RECORDED
    """Weights, optimizer state, gradients and activations of this arm alone; None on a CPU."""
    warm_up_s: float | None = NOT_RECORDED
    """From the first step until nothing was compiled any more."""
    graphs_compiled: int = NOT_RECORDED
    graph_breaks: int = NOT_RECORDED
    break_reasons: tuple[str, ...] = NOT_RECORDED
    """Why Dynamo broke the graph, in its own words, each once, at most a few."""
    recompilations: int = NOT_RECORDED
    """Frames compiled again because a guard failed, from the first step on."""
    recompile_reasons: tuple[str, ...] = NOT_RECORDED
    left_eager: tuple[str, ...] = NOT_RECORDED
    """Functions that reached the recompile limit, so that further calls run eagerly."""
    alloc_retries: int | None = NOT_RECORDED
    """Times the allocator had to free its cache and ask the GPU again (``num_alloc_retries``) while it warmed up."""


class Arm(Record, frozen=True, kw_only=True):
    """One variant of the training step: its time, and the proof that it ran what its name says."""

    name: str = NOT_RECORDED
    """``as_is``, ``bf16``, ``bf16_compiled``, ``prescribed``, or the name of a treatment; ``without_adapters`` and
    ``bf16_without_checkpointing`` are measurements; ``..._first`` is an arm as the first window saw it, where a final one
    timed it again; ``combination`` is everything that gained, where less of it is faster."""
    treatments: tuple[str, ...] = NOT_RECORDED
    base: str | None = NOT_RECORDED
    """The arm that this one changes, whose time minus its own is what the change saves; None where it changes none."""
    tried: bool = NOT_RECORDED
    reason: str | None = NOT_RECORDED
    """Why it was not tried, or why what was timed is not a number; None when it is one."""
    step_ms: float | None = NOT_RECORDED
    """Median at full depth; measured when the model was timed whole, else predicted from the cuts."""
    low_ms: float | None = NOT_RECORDED
    high_ms: float | None = NOT_RECORDED
    """Interval that holds the true median with 90 % confidence."""
    rounds_ms: tuple[float, ...] = NOT_RECORDED
    """One figure per interleaved round; the same round of two arms shares clocks and heat."""
    peak_gib: float | None = NOT_RECORDED
    static_gib: float | None = NOT_RECORDED
    """Of the peak: weights, buffers and optimizer state, at full depth."""
    beside: str | None = NOT_RECORDED
    """The arm beside which it was timed alone, because the memory did not hold all at once; None when all took turns."""
    tokens_ratio: float = NOT_RECORDED
    """Tokens of its step / tokens of the step as it is. Times are given for as many tokens as the step as it is has."""
    cuts: tuple[ArmCut, ...] = NOT_RECORDED
    fp8_gemms: int | None = NOT_RECORDED
    """FP8 GEMMs in one step of the deepest cut: kernels on CUDA, operators on a CPU."""
    graphs_run: int | None = NOT_RECORDED
    """Compiled regions entered in that step."""


class Health(Record, frozen=True, kw_only=True):
    """The GPU while the arms were timed, as NVML saw it, sampled."""

    samples: int = NOT_RECORDED
    sm_clock_low_mhz: int | None = NOT_RECORDED
    sm_clock_median_mhz: int | None = NOT_RECORDED
    sm_clock_high_mhz: int | None = NOT_RECORDED
    power_median_w: float | None = NOT_RECORDED
    power_limit_w: float | None = NOT_RECORDED
    temperature_high_c: int | None = NOT_RECORDED
    throttled_pct: dict[str, float] = NOT_RECORDED
    """Reason why clocks were held back, in the words of `Gpu.throttle_reasons` -> share of the samples."""
    other_processes: int | None = NOT_RECORDED
    """Most compute processes seen besides this one."""
    other_use_pct: float | None = NOT_RECORDED
    """Most of the GPU that they used at one time; None where NVML does not tell."""


class Trial(Record, frozen=True, kw_only=True):
    """The timed probe."""

    device: str = NOT_RECORDED
    gpu: str | None = NOT_RECORDED
    blocks: dict[str, int] = NOT_RECORDED
    """Lists of blocks that were cut -> blocks at full depth; empty when the model was measured whole."""
    arms: tuple[Arm, ...] = NOT_RECORDED
    self_check_ratio: float | None = NOT_RECORDED
    """BF16 / its own replica; 1.00 when nothing disturbed the timing."""
    reliable: bool = NOT_RECORDED
    reason: str | None = NOT_RECORDED
    harm: tuple[str, ...] = NOT_RECORDED
    """What the trial changed outside its copies of the model, put back where it could be; empty when nothing."""
    health: Health | None = NOT_RECORDED
    """None on a CPU."""
    budget_s: float | None = NOT_RECORDED
    elapsed_s: float | None = NOT_RECORDED


class Facts(Record, frozen=True, kw_only=True):
    """Everything that was observed of one job."""

    target: Target = NOT_RECORDED
    software: Software = NOT_RECORDED
    environment: Environment = NOT_RECORDED
    gpus: tuple[Gpu, ...] = NOT_RECORDED
    """All GPUs NVML sees, the visible ones marked; empty when there is none."""
    recipe_tries: dict[str, str | None] = NOT_RECORDED
    """Recipe of the model -> why a tiny GEMM of its kind failed on this GPU, None when it ran. Empty when none was tried:
    no CUDA in use in this process, or no recipe in the model that has such a GEMM."""
    network: Network = NOT_RECORDED
    training: Training = NOT_RECORDED
    workload: Workload = NOT_RECORDED
    trial: Trial = NOT_RECORDED
    """The timed probe; not recorded when none was asked for or there was no device for it."""
    assumed_gpu: str | None = NOT_RECORDED
    """GPU name given by ``--assume-gpu`` for the modelled costs."""
    gaps: dict[str, str] = NOT_RECORDED
    """Dotted path of a fact that could not be read -> the reason."""
    unrecognized: dict[str, Any] = NOT_RECORDED
    """Keys of a recording that this version does not know, kept for the next save."""

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Facts:
        """Facts from plain values. Raises `fp8doctor.record.UnreadableDocument` naming the key that does not fit."""
        facts = from_builtins(cls, data)
        unknown = unknown_keys(data, to_builtins(facts))
        return msgspec.structs.replace(facts, unrecognized=unknown) if unknown else facts

    def to_dict(self) -> dict[str, Any]:
        """Plain values, the inverse of `from_dict`."""
        data = to_builtins(self)
        restored: dict[str, Any] = restore_unknown_keys(data, data.pop("unrecognized", None))
        return restored


def recorded(value: Any) -> bool:
    """Whether a fact was recorded at all (``None`` is recorded)."""
    return value is not NOT_RECORDED
