"""What in a checkpoint is FP8, what will not load where, and how to export it."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator

from msgspec import Struct

from fp8doctor.checkpoints.headers import TE_REDUCE, Checkpoint, TensorHeader
from fp8doctor.wording import plural

SCALES = ("scale_inv", "weight_scale", "weight_scale_2")
"""Ends of the names of weights' scales: of DeepSeek and transformers; compressed-tensors, FBGEMM and torchao;
ModelOpt."""

EXTRA_STATE = "_extra_state"

TRAINED_IN_FP8 = "WeightWithDynamicFloat8CastTensor"
"""torchao's wrapper of a 16- or 32-bit weight that FSDP2 gathers in FP8."""

WRAPPERS = {
    "_orig_mod.": "torch.compile(model)",
    "_fsdp_wrapped_module.": "FSDP",
    "_checkpoint_wrapped_module.": "a checkpoint wrapper",
    "module.": "DistributedDataParallel",
}
"""Part of a name -> what put it there."""

MOVED = {
    "torchao.dtypes": "which torchao 0.19 no longer has",
    "torchao.float8.float8_tensor": "which is float8_training_tensor in torchao 0.18",
    "transformer_engine.pytorch.float8_tensor": "which Transformer Engine 2 has deprecated",
}
"""Module of a pickled class -> what became of it. Sources: pytorch/ao#4696; the wheel of torchao 0.18.0;
transformer_engine/pytorch/float8_tensor.py (2.20.2)."""

SAFE = frozenset("torch collections builtins __builtin__ _codecs _io numpy copyreg argparse pathlib".split())
"""Packages that a plain file of torch.save names."""

LIBRARIES = {
    "fp8": "transformers' FineGrainedFP8Config (blocks)",
    "fbgemm_fp8": "FBGEMM (rows)",
    "compressed-tensors": "compressed-tensors (llm-compressor, vLLM)",
    "modelopt": "NVIDIA ModelOpt",
    "torchao": "torchao",
    "quark": "AMD Quark",
}
"""``quant_method`` -> library."""


class Kind(Struct, frozen=True):
    """Tensors in low precision that are stored alike."""

    what: str
    """dtype, or class and package of a tensor subclass."""
    scaling: str
    count: int
    first: str


class Statement(Struct, frozen=True):
    text: str
    code: str = ""


class Conclusions(Struct, frozen=True):
    summary: str
    kinds: tuple[Kind, ...]
    problems: tuple[Statement, ...]
    export: tuple[Statement, ...]


def conclude(found: Checkpoint) -> Conclusions:
    """Conclude from the headers alone."""
    kinds = tuple(_kinds(found))
    total = plural(len(found.tensors), "tensor")
    in_fp8 = sum(each.count for each in kinds if TRAINED_IN_FP8 not in each.what)
    method = quant_method(found) or ("torchao" if "tensor_names" in found.metadata else "")
    by = f", by {LIBRARIES.get(method, method)}" if method and in_fp8 else ""
    none = f"None of {total} is in FP8. FP8 training keeps weights in 16 or 32 bits, so that is usual."
    return Conclusions(
        summary=f"In FP8: {in_fp8} of {total}{by}." if in_fp8 else none,
        kinds=kinds,
        problems=tuple(_problems(found, in_fp8)),
        export=tuple(_export(found, in_fp8)),
    )


def quant_method(found: Checkpoint) -> str:
    """Return the ``quant_method`` of the configuration; empty without one."""
    config = found.config.get("quantization_config") or {}
    return str(config.get("quant_method") or "") if isinstance(config, dict) else ""


def _kinds(found: Checkpoint) -> Iterator[Kind]:
    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, tensor in found.tensors.items():
        if tensor.subclass and is_of_fp8_library(tensor.subclass):
            package, kind = tensor.subclass.partition(".")[0], tensor.subclass.rpartition(".")[2]
            stands_for = (
                f"wraps {tensor.dtype}" if kind == TRAINED_IN_FP8 else f"within; read as {tensor.dtype}"
            )
            groups[f"{kind} ({package})", stands_for].append(name)
        elif tensor.dtype.startswith(("float8", "float4")) and not name.endswith(SCALES):
            groups[tensor.dtype, scaling_of(name, found)].append(name)
    for (what, scaling), names in groups.items():
        yield Kind(what, scaling, len(names), names[0])


def is_of_fp8_library(subclass: str) -> bool:
    return subclass.startswith(("torchao.", "transformer_engine."))


def scaling_of(name: str, found: Checkpoint) -> str:
    """Say how an FP8 weight is scaled, by the shape of its stored scale."""
    stems = (f"{name}_scale_inv", f"{name.removesuffix('_qdata')}_scale")  # torchao: _weight_qdata
    scale = next((found.tensors[each] for each in stems if each in found.tensors), None)
    return "no scale stored" if scale is None else _by_shape(found.tensors[name], scale)


def _by_shape(weight: TensorHeader, scale: TensorHeader) -> str:
    if math.prod(scale.shape) == 1:
        return "one scale per tensor"
    if len(weight.shape) < 2 or len(scale.shape) < 2:
        return f"scales of shape {list(scale.shape)}"
    rows, columns = (
        math.ceil(side / of) if of else 0
        for side, of in zip(weight.shape[-2:], scale.shape[-2:], strict=True)
    )
    if columns == weight.shape[-1] and rows == 1:
        return "one scale per row"
    return f"one scale per {rows} x {columns} block"


def _problems(found: Checkpoint, in_fp8: int) -> Iterator[Statement]:
    yield from _wrapped(found)
    yield from _extra_states(found)
    yield from _classes(found)
    unscaled = [name for name, each in found.tensors.items() if _is_unscaled(name, each, found)]
    if unscaled:
        yield Statement(
            f"{plural(len(unscaled), 'FP8 tensor')} without a scale (first {unscaled[0]}): a plain cast, or "
            "the scales are in another file. No loader scales them; small values have become zero."
        )
    method = quant_method(found)
    if method and not in_fp8 and method in ("fp8", "fbgemm_fp8"):
        yield Statement(
            f"config.json says quant_method {method}, and no tensor is in FP8: loaders look for scales that "
            "are not there.",
            '# delete "quantization_config" from config.json',
        )
    if (
        in_fp8
        and found.config
        and not method
        and found.form == "safetensors"
        and not found.metadata.get("tensor_names")
    ):
        yield Statement(
            "config.json has no quantization_config, so from_pretrained and vLLM take the FP8 numbers for "
            "the weights, without their scales."
        )


def _is_unscaled(name: str, tensor: TensorHeader, found: Checkpoint) -> bool:
    narrow = tensor.dtype.startswith(("float8_e4m3", "float8_e5m2")) and not tensor.subclass
    return narrow and not name.endswith(SCALES) and scaling_of(name, found) == "no scale stored"


def _wrapped(found: Checkpoint) -> Iterator[Statement]:
    for part, by in WRAPPERS.items():
        names = [name for name in found.tensors if name.startswith(part) or f".{part}" in name]
        if part == "module.":
            names = [name for name in found.tensors if name.startswith(part)]
            names = names if len(names) == len(found.tensors) else []
        if names:
            yield Statement(
                f'{plural(len(names), "name")} of {len(found.tensors)} contain "{part}", from {by}: a model '
                "without it reports them as unexpected keys, and its own as missing.",
                f'state = {{name.replace("{part}", ""): tensor for name, tensor in state.items()}}',
            )


def _extra_states(found: Checkpoint) -> Iterator[Statement]:
    tensors = {name: each for name, each in found.tensors.items() if name.endswith(EXTRA_STATE)}
    pickled = [name for name in found.others if name.endswith(EXTRA_STATE)]
    if not tensors and not pickled:
        return
    full = [name for name, each in tensors.items() if math.prod(each.shape)]
    yield Statement(
        f"{plural(len(tensors) + len(pickled), 'state')} of Transformer Engine's layers ({EXTRA_STATE}): "
        "torch.nn layers and Hugging Face models report them as unexpected keys.",
        'state = {name: tensor for name, tensor in state.items() if not name.endswith("_extra_state")}',
    )
    if full or pickled:
        yield Statement(
            f"Pickled scales and amax histories of delayed scaling in {len(full) + len(pickled)} of them: "
            "Transformer Engine 2.20.2 refuses to load those. Without them FP8 starts with scales of 1.",
            "export NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE=1   # only for files that you trust",
        )


def _classes(found: Checkpoint) -> Iterator[Statement]:
    foreign = sorted(each for each in found.classes if each.module.partition(".")[0] not in SAFE)
    packages = Counter(each.module.partition(".")[0] for each in foreign)
    for package, count in packages.most_common():
        first = next(str(each) for each in foreign if each.module.partition(".")[0] == package)
        yield Statement(
            f"Loading needs {package}, for {plural(count, 'name')} (first {first}). torch.load(weights_only="
            "True) refuses those that the package has not registered.",
            f"import {package}   # before torch.load",
        )
    for each in foreign:
        moved = next((told for module, told in MOVED.items() if each.module.startswith(module)), None)
        if moved:
            yield Statement(
                f"It names {each}, {moved}: load it where it was written, and save plain tensors."
            )
        if each.name == TE_REDUCE:
            yield Statement(
                f"It names {each}, which Transformer Engine 2.20 has; an older one may lack it and then "
                "raises AttributeError."
            )


def _export(found: Checkpoint, in_fp8: int) -> Iterator[Statement]:
    subclasses = {each.subclass for each in found.tensors.values() if is_of_fp8_library(each.subclass)}
    if found.form == "DCP":
        yield Statement(
            "To get one file from DCP's folder:",
            "python -m torch.distributed.checkpoint.format_utils dcp_to_torch FOLDER model.pt",
        )
    if any(TRAINED_IN_FP8 in each for each in subclasses):
        yield Statement(
            "For Hugging Face and vLLM: take the 16- or 32-bit weight out of each wrapper.",
            'state = {name: getattr(tensor, "_tensor", tensor) for name, tensor in state.items()}',
        )
    elif subclasses:
        yield Statement(
            "For Hugging Face and vLLM: turn the weights back into 16 bits.",
            'narrow = ("torchao.", "transformer_engine.")\n'
            "state = {name: tensor.dequantize() if type(tensor).__module__.startswith(narrow) else tensor\n"
            "         for name, tensor in state.items()}",
        )
    if not in_fp8 or subclasses:
        yield Statement(
            "To serve it in FP8, let vLLM quantize the 16-bit weights as it loads them.",
            "vllm serve FOLDER --quantization fp8",
        )
    elif quant_method(found):
        yield Statement(
            "vLLM and transformers read this form. To train on it, load it in 16 bits.",
            "model = AutoModelForCausalLM.from_pretrained(FOLDER, quantization_config=FineGrainedFP8Config("
            "dequantize=True))"
            if quant_method(found) == "fp8"
            else "",
        )
    yield Statement(
        "To prove an export, compare the names, dtypes and shapes, then the outputs of both.",
        "fp8doctor checkpoint BEFORE AFTER\n"
        "# torch.testing.assert_close(before(**batch).logits, after(**batch).logits, rtol=0.05, atol=0.05)",
    )


class Change(Struct, frozen=True):
    """How two checkpoints differ in some tensors."""

    what: str
    names: tuple[str, ...]


def differences(one: Checkpoint, other: Checkpoint) -> tuple[Change, ...]:
    """Compare names, dtypes and shapes; numbers are not read."""
    both = [name for name in one.tensors if name in other.tensors]
    changes: dict[str, list[str]] = defaultdict(list)
    for name in both:
        a, b = one.tensors[name], other.tensors[name]
        if a.shape != b.shape:
            changes[f"shape {list(a.shape)} became {list(b.shape)}"].append(name)
        if a.dtype != b.dtype:
            changes[f"{a.dtype} became {b.dtype}"].append(name)
        if a.subclass != b.subclass:
            changes[f"{a.subclass or 'a plain tensor'} became {b.subclass or 'a plain tensor'}"].append(name)
    for text, mine, theirs in (("only in the first", one, other), ("only in the second", other, one)):
        if lone := [name for name in mine.tensors if name not in theirs.tensors]:
            changes[text] = lone
    return tuple(Change(what, tuple(names)) for what, names in changes.items())
