"""The training step of a model: matmuls, casts, attention, loss, optimizer, rest.

None if a part has no numbers. Measured on one H200, torch 2.11, torchao 0.18, TE 2.20.2, November 2026."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator

from msgspec import Struct
from msgspec.structs import replace

from fp8doctor.cost.layer import Call, in_plain_bf16, layer_ms, recipe_on, uncompiled
from fp8doctor.cost.matmuls import (
    TE_RECOMPUTE_HOST_MS,
    NoNumbers,
    calls_of,
    launches,
    micro_batches,
    one_by_one,
    routed_rows,
    rows_of,
    rows_seen,
    step_tokens,
    unseen_recompute,
)
from fp8doctor.facts import Facts, Family, Linear, Network, recorded
from fp8doctor.gpus import GpuSpec, memory_ms, modelled_gpu
from fp8doctor.recipes import RECIPES, TORCHAO, stack_of

ATTENTION_EFFICIENCY = {64: 0.264, 128: 0.407}
"""Width of a head -> share of the BF16 peak that causal attention reaches in forward and backward together:
11.05 ms for 24 layers of 16 heads and 16 x 1024 tokens, 4.79 ms for 4 layers of 32 heads and 4 x 2048 tokens;
cuDNN."""

ATTENTION_TOKENS = {64: (1024, 952), 128: (2048, 686)}
"""Tokens of the sequence that this share was measured with, and those at which causal attention reaches half
of its best: 242, 318 and 416 TFLOP/s of width 64 with 1024, 2048 and 8192 tokens, 447 and 551 of width 128
with 2048 and 8192 (research/benchmarks/measured/h200_sweep.json.gz). Tiles on the diagonal are computed
whole, and the shorter the sequence, the more of them are. Without a mask there is one measurement."""

NARROW_HEADS_UP_TO = 2048
"""Width of attention up to which heads count as 64 wide, above as 128: as in GPT-2, Llama 1B and 8B."""

BACKWARD_OF_ATTENTION = 2.5
"""FLOPs of attention's backward / forward: five products, not two. Source: arXiv 2307.08691."""

LOSS_BYTES = {"16bit": 19.0, "fp32": 50.0}
"""Bytes per logit of the cross entropy, forward and backward. fp32, as transformers and most people's own
``.float()`` have it: 34 for log-softmax, measured (4.17 ms for 4096 x 128256), 16 counted for the conversions
and fills; in 16 bits half of the first and 2."""

OPTIMIZER_BYTES = 24.0
"""Bytes per trainable parameter of a fused AdamW step in 16 bits: 43.9 ms for 8.03 B. It moves 14."""

FP32_OPTIMIZER_BYTES = 28.0
"""The same for fp32 parameters: it reads four tensors and writes three. Counted; 762 M took 34.6 and 31.6
(h200- and h100-whisper_medium)."""

QUERIES = "q q_proj q_b_proj q_lin q_head query query_proj wq to_q linear_q".split()

FUSED_QUERIES = "qkv qkv_proj query_key_value c_attn in_proj Wqkv wqkv to_qkv linear_qkv".split()
"""Last part of the name of a Linear that every attention has once."""

HOST_MS = {"eager": 0.39, "compiled": 0.23}
"""Host time of a step / its Linears, everything around them included: 22.2 and 12.9 ms."""

KERNELS = 10
"""Kernels of a step / its Linears in 16 bits, all else included: 8.4 to 13.2 counted, eager or compiled."""

GAP_MS = 0.001
"""Idle time between two kernels: 0.6 to 3 us, the steps of seven variants less the time of their kernels."""

BALANCE = 0.8
"""Time of the host / the GPU, or of the GPU / the host, from which a step takes longer than either: where
they take turns in being the slower, no kernel runs meanwhile. A convention of this tool: the Gemma has 0.9,
and was idle for 15% of its step."""


class Work(Struct, frozen=True):
    """A training step as one GPU computes it: all that its time depends on, but for the GPU."""

    calls: tuple[Call, ...]
    """The Linears of one micro-batch."""
    attention: tuple[tuple[float, float], ...]
    """FLOPs of one micro-batch, and the share of the BF16 peak that they reach, of each layer."""
    loss_bytes: float
    """Effective bytes of one micro-batch's cross entropy."""
    optimizer_bytes: float
    """Effective bytes of one step of the optimizer."""
    accumulate: int = 1
    eager_how: str = "eager"
    """Key of `fp8doctor.cost.layer.BETWEEN_BYTES` for what is not compiled."""
    autocast: bool = False


class ModelledStep(Struct, frozen=True):
    """One step at full depth, with its parts."""

    families_ms: dict[Family, float]
    busy_ms: float
    host_ms: float
    step_ms: float
    """The slower of GPU and host."""
    gpu: str
    calls: list[tuple[Call, dict[Family, float]]]
    """The Linears of one micro-batch."""
    compiled: bool = False
    """True if `modelled_bf16` compiled all of it."""

    @property
    def idle_ms(self) -> float:
        return max(0.0, self.step_ms - self.busy_ms)

    @property
    def in_balance(self) -> bool:
        return BALANCE * self.busy_ms <= self.host_ms <= self.busy_ms / BALANCE

    def scaled(self, by: float) -> ModelledStep:
        families = {family: by * ms for family, ms in self.families_ms.items()}
        busy, host, step = (by * ms for ms in (self.busy_ms, self.host_ms, self.step_ms))
        return replace(self, families_ms=families, busy_ms=busy, host_ms=host, step_ms=step)


KINDS: tuple[Family, ...] = ("gemm_fp8", "gemm_16bit", "gemm_fp32", "cast", "pointwise")
"""What a Linear and the work next to it take."""


def priced(work: Work, gpu: GpuSpec) -> ModelledStep:
    """Model a step on a GPU. Raises `NoNumbers`."""
    calls, host, kernels, untimed = [], 0.0, 0.0, ""
    for call in work.calls:
        linear, count = call.linear, call.count * launches(call.linear)
        parts = layer_ms(call, gpu, work.eager_how, autocast=work.autocast)
        calls.append((call, {family: call.count * ms for family, ms in parts.items()}))
        host += count * HOST_MS["eager" if linear.compiled is None else "compiled"]
        kernels += count * KERNELS
        if linear.use == "training":
            stack, recipe = stack_of(linear), RECIPES[linear.stack, recipe_on(linear, gpu) or ""]
            launch = stack.eager if linear.compiled is None else stack.compiled
            host += call.count * launches(linear, call.weights_cast) * launch.host_ms
            kernels += count * launch.kernels
            untimed = untimed if recipe.first < (10, 0) else recipe.words  # nobody here had a Blackwell
    families = {family: sum(parts[family] for _, parts in calls) for family in KINDS}
    families["attention"] = sum(flops / (gpu.bf16_tflops * 1e9 * share) for flops, share in work.attention)
    families["loss"] = memory_ms(work.loss_bytes, gpu)
    families = {family: time * work.accumulate for family, time in families.items()}
    families["optimizer"] = memory_ms(work.optimizer_bytes, gpu)
    busy, host = sum(families.values()), host * work.accumulate
    paced_by_gpu = busy + GAP_MS * kernels * work.accumulate
    if untimed and host > paced_by_gpu:
        raise NoNumbers(f"the host may set the pace, and nobody timed it launching {untimed}")
    te = [each for each in work.calls if each.recomputed and stack_of(each.linear).under_autocast]
    again = sum(each.count * launches(each.linear) for each in te if each.linear.use == "training")
    if again and host + TE_RECOMPUTE_HOST_MS * again * work.accumulate > max(paced_by_gpu, host):
        raise NoNumbers("recomputing Transformer Engine's layers takes the host longer than the GPU computes")
    return ModelledStep(families, busy, host, max(paced_by_gpu, host), gpu.name, calls)


def modelled_step(facts: Facts) -> ModelledStep | None:
    """Model the step on the modelled GPU; None if numbers are missing."""
    if not recorded(facts, "network.linears"):
        return None
    try:
        return priced_step(facts)
    except NoNumbers:
        return None


def known_gpu(facts: Facts) -> GpuSpec:
    """Choose the GPU whose step is modelled. Raises `NoNumbers` if it has no datasheet."""
    if gpu := modelled_gpu(facts):
        return gpu
    raise NoNumbers("fp8doctor has no datasheet of this GPU")


def priced_step(facts: Facts) -> ModelledStep:
    """Model the step on the modelled GPU. Raises `NoNumbers`."""
    gpu, work = known_gpu(facts), work_of(facts)
    if reason := _unknown_form(facts, work):
        raise NoNumbers(reason)
    return priced(work, gpu)


def work_of(facts: Facts) -> Work:
    """Describe the step of a job on one GPU; calls whose rows are unknown have none."""
    network = facts.network
    in_fp32 = all(each.dtype == "float32" for each in network.linears)
    each_trained = FP32_OPTIMIZER_BYTES if in_fp32 else OPTIMIZER_BYTES
    return Work(
        calls=tuple(call_of(each, facts) for each in network.linears),
        attention=tuple(attention(facts)),
        loss_bytes=LOSS_BYTES["fp32"] * logits(facts),
        optimizer_bytes=each_trained * network.get("trainable_parameters", 0),
        accumulate=micro_batches(facts),
        eager_how=uncompiled(facts),
        autocast=facts.get("training.autocast") == "bfloat16",
    )


def _unknown_form(facts: Facts, work: Work) -> str:
    """Say what of a step, not of its layers, the model does not know; empty if nothing."""
    if reason := unmodelled(facts.network):
        return reason
    if facts.network.get("trainable_parameters") == 0:
        return "no parameter is trained"
    if (module := unseen_recompute(facts)) is not None:
        return f"nobody saw which layers {module or 'the model'} recomputes"
    unknown = [each.linear for each in work.calls if not each.rows]
    if not unknown:
        return ""
    if not step_tokens(facts) and len(unknown) == len(facts.network.linears):
        return facts.get("gaps", {}).get("workload.rows") or "nothing says how many rows the layers multiply"
    if any(each.get("role") == "experts" for each in unknown):
        return "nothing says how many experts a token visits"
    more = f" and {len(unknown) - 1} more" if unknown[1:] else ""
    return f"nothing says how many rows {unknown[0].name}{more} multiplies"


def call_of(linear: Linear, facts: Facts) -> Call:
    """Read how often a layer is called, with which rows; 0 if they are unknown."""
    rows, calls = rows_of(linear, facts), calls_of(linear, facts)
    if linear.get("role") == "experts":
        rows, calls = routed_rows(linear, facts), 1
    fp32 = linear.adapter == "adapter" and linear.dtype == "float32" and linear.use == "none"
    fp32 = fp32 and not facts.get("training.autocast")  # PEFT's, under no known autocast
    again = float(linear.get("checkpointed") is not None)
    return Call(linear, rows or 0, calls, recomputed=again, fp32=fp32)


def attention(facts: Facts) -> Iterator[tuple[float, float]]:
    """Count the FLOPs of each layer with a query projection, and the share of the peak that they reach.

    Causal with a vocabulary. A layer that sees more rows than the tokens, such as an encoder next to a
    decoder, has longer sequences in proportion.
    """
    length, tokens = facts.get("workload.sequence_length"), step_tokens(facts)
    if not length or not tokens:
        return
    causal = has_vocabulary(facts.network)
    for linear in queries(facts.network):
        width = linear.out_features if linear.layer.rpartition(".")[2] in QUERIES else linear.in_features
        rows = rows_of(linear, facts) or tokens
        longest = length * rows / tokens
        times = 1 + BACKWARD_OF_ATTENTION + (linear.get("checkpointed") is not None)
        flops = 4.0 * calls_of(linear, facts) * rows * longest * width * times
        head = 64 if width <= NARROW_HEADS_UP_TO else 128
        efficiency, (at, half) = ATTENTION_EFFICIENCY[head], ATTENTION_TOKENS[head]
        if causal:
            flops, efficiency = flops / 2, efficiency * (at + half) / at * longest / (longest + half)
        yield flops, efficiency


def queries(network: Network) -> list[Linear]:
    """List the Linears that every attention has once; the ``in_proj`` of Mamba makes no keys and values."""
    last = {each.name: each.layer.rpartition(".")[2] for each in network.linears if each.adapter != "adapter"}
    found = [each for each in network.linears if last.get(each.name) in QUERIES + FUSED_QUERIES]
    return [
        each for each in found if last[each.name] != "in_proj" or each.out_features == 3 * each.in_features
    ]


def unmodelled(network: Network) -> str:
    """Say which work of a network is none of Linears or attention's; empty if none is known.

    Of convolutions or an LSTM; in transformers, of blocks without a known attention, as Mamba's.
    """
    counted = all(recorded(each, "parameters") for each in (network, *network.linears))
    held = 2 * sum(each.parameters for each in network.linears) if counted else 0
    if has_vocabulary(network) and recorded(network, "hidden_size"):
        held += (network.vocabulary or 0) * (network.hidden_size or 0)
    if not network.linears or (counted and held < network.parameters):
        return "most parameters are outside of Linears, and the cost model has only those"
    blocks = max((each.get("count", 0) for each in network.get("blocks", ())), default=0)
    unknown = blocks - len(queries(network))
    if not network.get("kind", "").startswith("transformers.") or unknown <= 0:
        return ""
    model = network.kind.rpartition(".")[2]
    return f"fp8doctor knows no attention in {unknown} of the {blocks} blocks of {model}"


def logits(facts: Facts) -> float:
    """Count the logits of a micro-batch's cross entropy; 0 without a vocabulary."""
    heads = (linear for linear in facts.network.linears if linear.role == "head")
    found = max((linear.out_features * (rows_of(linear, facts) or 0) for linear in heads), default=0)
    return found if has_vocabulary(facts.network) else 0


def has_vocabulary(network: Network) -> bool:
    return network.get("vocabulary") is not None


def with_each(facts: Facts, change: Callable[[Linear], Linear]) -> Facts:
    return with_linears(facts, map(change, facts.network.linears))


def in_bf16(facts: Facts, names: Collection[str] | None = None) -> Facts:
    """Turn the FP8 Linears of these names into plain ones, or all of them."""

    def plain(linear: Linear) -> Linear:
        turns = linear.use == "training" and (names is None or linear.name in names)
        return in_plain_bf16(linear) if turns else linear

    return with_each(facts, plain)


def in_fp8(facts: Facts, layers: Iterable[Linear], recipe: str = "tensorwise") -> Facts:
    names, made = {each.name for each in layers}, {"use": "training", "stack": TORCHAO.name, "recipe": recipe}
    return with_each(facts, lambda each: replace(each, **made) if each.name in names else each)


def with_linears_compiled(facts: Facts, *, yes: bool) -> Facts:
    """Compile every Linear as the printed lines do, which leave a head in 16 bits as it is; or none.

    A te.GroupedLinear stays uncompiled: Dynamo breaks its graphs at Transformer Engine's experts.
    """

    def compiled(linear: Linear) -> Linear:
        if yes and linear.role == "head" and linear.use != "training":
            return linear
        return replace(linear, compiled="" if yes and not one_by_one(linear) else None)

    return with_each(facts, compiled)


def with_adapters_in_bf16(facts: Facts) -> Facts:
    """Give LoRA's fp32 matrices the dtype of a BF16 base."""
    in_fp32 = ("adapter", "float32")
    return with_each(
        facts, lambda each: replace(each, dtype="bfloat16") if (each.adapter, each.dtype) == in_fp32 else each
    )


def with_recipe(facts: Facts, recipe: str) -> Facts:
    return with_each(facts, lambda each: replace(each, recipe=recipe) if each.use == "training" else each)


def with_tokens(facts: Facts, tokens: int) -> Facts:
    """Give every micro-batch more samples, with as many tokens per step if possible."""
    now = step_tokens(facts)
    if not now:
        return facts
    rows = {
        layer: tuple(round(each * tokens / now) for each in seen)
        for linear in facts.network.linears
        if (seen := rows_seen(linear, facts)) and (layer := linear.name)
    }
    accumulate = max(1, round(micro_batches(facts) * now / tokens))
    workload = replace(facts.workload, tokens=tokens, rows=rows, accumulate=accumulate)
    more = replace(facts, workload=workload)
    return replace(more, trial=replace(facts.trial, rows=rows)) if recorded(facts, "trial.rows") else more


def with_linears(facts: Facts, linears: Iterable[Linear]) -> Facts:
    return replace(facts, network=replace(facts.network, linears=tuple(linears)))


UNCERTAINTY = 0.25
"""Half-width of the interval around a modelled saving. Of 12 measured savings of 32 to 621 ms 11 lie inside
it; one with adapters in FP32 saves 6% more. One H200, research/benchmarks/measured/h200_steps.json.gz."""
