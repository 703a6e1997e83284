"""The module tree: linear-like layers, blocks, how FP8 layers scale."""

from typing import Literal

from fp8doctor.facts.record import NOT_RECORDED, Prose, Record

Use = Literal["training", "storage", "none", "unknown"]
"""A stack's use of a layer: FP8 matmuls in training; FP8 (or other) weights only; none, in 16 or 32 bits.
Unknown is a user's own layer that is named after FP8 and calls no known matmul."""

GATHERED_AS = "gathered_as"
"""Feature: the dtype in which FSDP's mixed precision gathers the weight."""


class Linear(Record, frozen=True, kw_only=True):
    """One linear-like layer: a module, functional projection or 3-D expert weight."""

    name: str = NOT_RECORDED
    """Fully qualified name in the model, wrappers such as ``_orig_mod`` taken out."""
    kind: str = NOT_RECORDED
    """Qualified class name, such as ``torchao.float8.float8_linear.Float8Linear``."""
    stack: str = NOT_RECORDED
    """The stack that recognized it (`fp8doctor.stacks`); ``torch`` for ordinary layers."""
    use: Use = NOT_RECORDED
    recipe: str | None = NOT_RECORDED
    """Scaling recipe of its configuration: tensorwise, rowwise, rowwise_with_gw_hp, mxfp8, delayed, ..."""
    features: dict[str, bool | int | str | None] = NOT_RECORDED
    """Settings of the stack that change the cost, such as ``emulate`` and ``pad_inner_dim``."""
    engaged: bool | None = NOT_RECORDED
    """True if its last training forward ran in FP8; None if no record is kept or none was run."""
    in_features: int = NOT_RECORDED
    out_features: int = NOT_RECORDED
    gemms: int = NOT_RECORDED
    """Matmuls of this shape in one forward: 2 in some fused MLPs, the experts of a 3-D weight."""
    bias: bool = NOT_RECORDED
    dtype: str = NOT_RECORDED
    """Logical dtype of the weight, such as ``bfloat16``; of the stored data for FP8 weights."""
    weight_class: str | None = NOT_RECORDED
    """Qualified class of a tensor subclass that holds the weight; None for an ordinary Parameter."""
    requires_grad: bool = NOT_RECORDED
    role: Literal["body", "head", "router", "experts"] = NOT_RECORDED
    adapter: Literal["base", "adapter"] | None = NOT_RECORDED
    """With LoRA: the frozen base layer, or one of the low-rank matrices. None without."""
    adapts: str | None = NOT_RECORDED
    """With LoRA: name of the layer that base and matrices are parts of."""
    compiled: str | None = NOT_RECORDED
    """Name of the compile mark that covers it (empty: the whole model); None if it runs uncompiled."""
    checkpointed: str | None = NOT_RECORDED
    """Name of the checkpointed region that covers it; None if its activations are kept."""
    parameters: int = NOT_RECORDED
    flops_per_token: float | None = NOT_RECORDED
    """Matmul FLOPs of forward and backward for one token: 2·K·N each for output, input gradient and, when the
    weight is trained, weight gradient; expert weights scaled by the experts a token visits."""
    flops_share_pct: float | None = NOT_RECORDED

    @property
    def multiplies_in(self) -> str:
        """Dtype of the weight in the forward, which FSDP may gather in another than it keeps."""
        return str(self.get("features", {}).get(GATHERED_AS) or self.dtype)

    @property
    def layer(self) -> str:
        """Its name without LoRA's part."""
        adapted: str | None = self.get("adapts")
        return adapted or self.get("name", "").partition(".lora_")[0].removesuffix(".base_layer")


class Blocks(Record, frozen=True, kw_only=True):
    """A list of repeated blocks, such as the decoder layers."""

    name: str = NOT_RECORDED
    kind: str = NOT_RECORDED
    """Qualified class, the commonest if blocks of several classes take turns."""
    container: Literal["list", "ModuleDict"] = NOT_RECORDED
    """``list``: ModuleList or Sequential, iterated; the blocks of a ModuleDict are its ``values()``."""
    forward_of_torch: bool = NOT_RECORDED
    """True if their forward is torch.nn's own, inherited or not, which `CompileMark.compiles` depends on."""
    count: int = NOT_RECORDED
    compiled: int = NOT_RECORDED
    """Blocks that are covered by a compile mark, their own or one above."""


class Scaling(Record, frozen=True, kw_only=True):
    """One way in which FP8 layers are scaled, read back from their configuration."""

    stack: str = NOT_RECORDED
    layers: int = NOT_RECORDED
    first: str = NOT_RECORDED
    """Name of the first of these layers."""
    forward_dtypes: tuple[str, ...] = NOT_RECORDED
    """Float8 dtypes of input and weight in the forward matmul, each once, such as ``float8_e4m3fn``."""
    amax_history_len: int | None = NOT_RECORDED
    """Steps that delayed scaling looks back over; None for every other scaling."""
    amax_compute_algo: str | None = NOT_RECORDED
    """``max``, ``most_recent`` or ``custom`` (a function) over that history; None for every other scaling."""


class Attention(Record, frozen=True, kw_only=True):
    """One implementation of attention: a configuration of transformers, or a class that calls torch's own."""

    name: str = NOT_RECORDED
    """Outermost module with this configuration, or the first of that class; empty is the whole model."""
    kind: str = NOT_RECORDED
    """Qualified class of that module."""
    implementation: str = NOT_RECORDED
    """``_attn_implementation``: ``eager``, ``sdpa``, ``flash_attention_2``, ...; ``sdpa`` for torch's own."""
    has_sdpa: bool | None = NOT_RECORDED
    """True if transformers has fused attention for it (``_supports_sdpa``); None if it does not say."""
    needs_eager: str | None = NOT_RECORDED
    """A setting that only eager attention honours: ``output_attentions=True``; None if none is set."""


class Network(Record, frozen=True, kw_only=True):
    """The module tree."""

    kind: str = NOT_RECORDED
    """Qualified class of the root, wrappers taken off."""
    forward_of_torch: bool = NOT_RECORDED
    """True if its forward is torch.nn's own, inherited or not."""
    parameters: int = NOT_RECORDED
    """Elements of all parameters, a shared one counted once."""
    trainable_parameters: int = NOT_RECORDED
    adapter_parameters: int = NOT_RECORDED
    dtypes: dict[str, int] = NOT_RECORDED
    """Elements of the parameters by dtype."""
    devices: tuple[str, ...] = NOT_RECORDED
    """Device types of parameters and buffers: ``cuda``, ``cpu``, ``meta``."""
    modules: int = NOT_RECORDED
    linears: tuple[Linear, ...] = NOT_RECORDED
    blocks: tuple[Blocks, ...] = NOT_RECORDED
    broken_ties: tuple[tuple[str, str], ...] = NOT_RECORDED
    """Pairs of parameter names that the model declares as tied (transformers) and that are two Parameters."""
    quantization: Prose | None = NOT_RECORDED
    """``quant_method`` of the configuration: ``bitsandbytes``, ``gptq``, ``fp8``, ...; None without one."""
    fp8_calls: tuple[str, ...] = NOT_RECORDED
    """What is in FP8 outside of layers: classes of FP8 attention, functions that a forward called."""
    fp32_products: tuple[str, ...] = NOT_RECORDED
    """Modules whose forward multiplies fp32 tensors, as a forward showed; those with the largest first."""
    hooks: int = NOT_RECORDED
    """Forward and backward hooks on all modules together."""
    float8_parameters: int = NOT_RECORDED
    """Parameters whose own dtype is one of torch's float8 types, in any module."""
    wrappers: tuple[str, ...] = NOT_RECORDED
    """Classes that wrap the root, outermost first: OptimizedModule, DistributedDataParallel, ..."""
    vocabulary: int | None = NOT_RECORDED
    hidden_size: int | None = NOT_RECORDED
    heads: int | None = NOT_RECORDED
    """Heads of attention, by the configuration; None if it does not tell."""
    key_value_heads: int | None = NOT_RECORDED
    """Heads that share keys and values; None if the configuration does not tell."""
    scalings: tuple[Scaling, ...] = NOT_RECORDED
    """Scaling of the FP8 layers; without those whose library keeps no record, and TE's before a forward."""
    attentions: tuple[Attention, ...] = NOT_RECORDED
    """Empty if neither transformers' configuration nor a call of torch's own tells how it is computed."""
    save_pretrained: bool = NOT_RECORDED
    """True if the root is a model of transformers or PEFT, whose ``save_pretrained`` writes safetensors."""

    @property
    def fp8(self) -> list[Linear]:
        """Layers that are set up for FP8 training."""
        return [each for each in self.linears if each.use == "training"]
