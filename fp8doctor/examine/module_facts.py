"""Describe the module tree and its attention as facts; works on the meta device.

Names of transformers 4.53 to 5.23.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import islice
from typing import Any

from torch import Tensor, nn

from fp8doctor.examine.distributed import is_fsdp2
from fp8doctor.examine.linears import PRETRAINED, Found, describe, elements, examine_scaling, find_layers
from fp8doctor.examine.marks import chain, forward_of_torch, huggingface_flag, is_called
from fp8doctor.examine.walk import Place, Tree, experts_of, hooks
from fp8doctor.facts import NOT_RECORDED, Attention, Blocks, Network
from fp8doctor.facts.scrub import scrub
from fp8doctor.stacks.looking import (
    buffers_of,
    class_name,
    forward_of,
    home,
    is_a,
    lineage,
    modules_of,
    parameters_of,
    read,
    read_class,
    state_of,
)
from fp8doctor.stacks.tensors import dtype_name, is_float8, stored, whole_size

CONFIGS = ("config", "model_args", "args", "params")
"""Attributes with a model's sizes, in order of looking."""
VOCABULARY = ("vocab_size", "padded_vocab_size", "n_vocab")
HIDDEN = ("hidden_size", "n_embd", "d_model", "dim")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads")

FP8_ATTENTION = re.compile(
    r"(fp8|float8|mxfp8|nvfp4).*att(n|ention)|att(n|ention).*(fp8|float8|mxfp8|nvfp4)", re.IGNORECASE
)
"""Classes of FP8 attention: torchao's wrapper, which axolotl's ``attn_implementation: fp8`` uses."""


def examine_network(tree: Tree, gaps: dict[str, str]) -> Network:
    config = find_config(tree)
    vocabulary, hidden_size = sizes(config, tree)
    found = find_layers(tree, gaps)
    blocks = find_blocks(tree, found)
    held: dict[int, tuple[str, Tensor, int, str]] = {  # name, tensor, elements and dtype
        key: (name, each, whole_size(each), dtype_name(each))
        for key, (name, each) in tree.parameters.items()
        if not is_a(each, nn.UninitializedParameter)
    }
    for place, layer in found:
        if layer.use == "storage" and len(layer.weights) == 1:
            weight = layer.weights[0]
            if id(weight) in held or is_float8(weight):  # else it is a buffer
                name = held[id(weight)][0] if id(weight) in held else place.name
                held[id(weight)] = name, weight, elements(layer), dtype_name(stored(weight))
    dtypes: Counter[str] = Counter()
    for _, _, count, dtype in held.values():
        dtypes[dtype] += count
    tensors = [each for _, each, _, _ in held.values()]
    buffers = (each for place in tree.places for each in buffers_of(place.module).values())
    adapters = [place.module for place in tree.places if place.adapter == "adapter"]
    tuned = {id(each) for module in adapters for each in parameters_of(module).values()}
    tuned |= {key for key, (name, *_) in held.items() if ".lora_" in f".{name}"}
    kinds = (type(place.module).__name__ for place in tree.places if not place.idle)
    return Network(
        kind=class_name(type(tree.root.module)),
        forward_of_torch=forward_of_torch(tree.root.module),
        parameters=sum(dtypes.values()),
        trainable_parameters=sum(count for _, each, count, _ in held.values() if each.requires_grad),
        adapter_parameters=sum(held[key][2] for key in tuned if key in held),
        dtypes=dict(dtypes),
        devices=tuple(sorted({each.device.type for each in (*tensors, *buffers)})),
        modules=len(tree.places),
        linears=describe(found, tree, config, vocabulary, blocks, gaps),
        blocks=blocks,
        broken_ties=broken_ties(tree, gaps),
        quantization=quantization(tree),
        fp8_calls=tuple(dict.fromkeys(filter(FP8_ATTENTION.search, kinds))),
        hooks=sum(hooks(each) for place in tree.places for each in place.modules),
        float8_parameters=sum(map(is_float8, tensors)),
        wrappers=wrappers(tree.root),
        save_pretrained=not {PRETRAINED, ("peft.peft_model", "PeftModel")}.isdisjoint(tree.root.lineage),
        vocabulary=vocabulary,
        hidden_size=hidden_size,
        scalings=examine_scaling(tree),
        attentions=examine_attention(tree),
        heads=_size(config, HEADS),
        key_value_heads=_size(config, ("num_key_value_heads", "n_kv_heads", "n_kv_head")),
    )


def find_config(tree: Tree) -> Any:
    for place in tree.places:
        for attribute in CONFIGS:
            config = state_of(place.module).get(attribute)
            inner = read(config, "text_config")
            config = config if inner is None else inner
            if any(type(read(config, name)) is int for name in (*VOCABULARY, *HIDDEN)):
                return config
    return None


def sizes(config: Any, tree: Tree) -> tuple[int | None, int | None]:
    """Return vocabulary and hidden size, configured or of the longest embedding.

    One of fewer than 16 entries embeds kinds, such as SAM's 4 kinds of points. A choice.
    """
    modules = [each.module for each in tree.places]
    embeddings = [each for each in modules if is_a(each, (nn.Embedding, nn.EmbeddingBag))]
    tables = [each for each in embeddings if type(read(each, "num_embeddings")) is int]
    table = max(tables, key=lambda each: int(read(each, "num_embeddings")), default=None)
    vocabulary, hidden = _size(config, VOCABULARY), _size(config, HIDDEN)
    if vocabulary is None and read(table, "num_embeddings", 0) >= 16:
        vocabulary = read(table, "num_embeddings")
    return vocabulary, read(table, "embedding_dim") if hidden is None else hidden


def _size(config: Any, names: Sequence[str]) -> int | None:
    return next((size for name in names if type(size := read(config, name)) is int), None)


def broken_ties(tree: Tree, gaps: dict[str, str]) -> Any:
    """Return declared ties of a transformers model that are two parameters.

    ``all_tied_weights_keys`` (5.0 to 5.23) leaves out ties that the configuration disables or a checkpoint
    broke.
    """
    place = next((place for place in tree.places if PRETRAINED in place.lineage), None)
    if place is None:
        return ()
    declared = state_of(place.module).get("all_tied_weights_keys")
    if not isinstance(declared, dict):
        gaps["network.broken_ties"] = (
            "this transformers model keeps no list of its tied weights where 5.0 to 5.23 do"
        )
        return NOT_RECORDED
    below = f"{place.name}." if place.name else ""
    of_peft = re.compile(r"\.(base_layer|original_module)\b")  # names of the layer inside
    held = {of_peft.sub("", name): parameter for name, parameter in tree.named_parameters()}
    pairs = [(below + one, below + other) for one, other in declared.items()]
    return tuple(pair for pair in pairs if len({id(held[each]) for each in pair if each in held}) == 2)


def quantization(tree: Tree) -> str | None:
    configs = (state_of(place.module).get("config") for place in tree.places)
    for config in {id(config): config for config in configs}.values():
        settings = read(config, "quantization_config")
        method, dequantized = (
            settings.get(name) if isinstance(settings, dict) else read(settings, name)
            for name in ("quant_method", "dequantize")
        )
        if method is not None and dequantized is not True:
            return scrub(str(read(method, "value", method)))
    return None


def wrappers(root: Place) -> tuple[str, ...]:
    """List the root's wrappers, outermost first; FSDP2 changes the class and is last."""
    names = [lineage(type(module))[0][1] for module in root.wrappers]
    return (*names, "FSDPModule") if is_fsdp2(root) else tuple(names)


Sides = defaultdict[int, list[tuple[int, int]]]
"""``id`` of a place -> the sides of each linear layer inside it."""


def find_blocks(tree: Tree, found_layers: Sequence[Found]) -> tuple[Blocks, ...]:
    """Find the outermost lists of two or more similar modules with linear layers."""
    inside: Sides = defaultdict(list)
    for owner, layer in found_layers:
        for above in islice(owner.upwards(), 1, None):
            inside[id(above)].append((layer.in_features, layer.out_features))
    found, chosen = [], set()
    for place in tree.places:
        if place.parent and id(place.parent) in chosen:
            chosen.add(id(place))
        elif is_blocks(place, inside):
            chosen.add(id(place))
            blocks = place.children
            kinds = Counter(class_name(type(each.module)) for each in blocks)
            found.append(
                Blocks(
                    name=place.name,
                    kind=kinds.most_common(1)[0][0],
                    container="ModuleDict" if is_a(place.module, nn.ModuleDict) else "list",
                    forward_of_torch=any(forward_of_torch(each.module) for each in blocks),
                    count=len(blocks),
                    compiled=sum(each.compiled is not None for each in blocks),
                )
            )
    return tuple(found)


def is_blocks(place: Place, inside: Sides) -> bool:
    """Tell if a list's children are repeated blocks, not bare Linears, experts or lists.

    Alternating classes, such as attention and Mamba, must share a width each. Blocks of one class must come
    in at most half as many sizes: no graph serves two levels of a U-Net.
    """
    lists = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
    if not is_a(place.module, lists) or experts_of(place):
        return False
    sides = [inside[id(child)] for child in place.children]
    if len(sides) < 2 or not all(sides) or not all(is_called(child.module) for child in place.children):
        return False
    classes = {class_name(type(child.module)) for child in place.children}
    if len(classes) == 1:
        return 2 * len(set(map(tuple, sides))) <= len(sides)
    widths = ({into for into, _ in each} & {out for _, out in each} for each in sides)
    return 2 * len(classes) <= len(sides) and bool(set.intersection(*widths))


def examine_attention(tree: Tree) -> tuple[Attention, ...]:
    found: dict[int, Attention] = {}
    asked: set[type] = set()
    for place in tree.places:
        module, config = place.module, state_of(place.module).get("config")
        kind, implementation = type(module), read(config, "_attn_implementation")
        known = {"name": place.name, "kind": class_name(kind)}
        if (
            isinstance(implementation, str)
            and PRETRAINED in place.lineage
            and id(config) not in found
            and is_followed(place, config)
        ):
            has_sdpa = read_class(kind, "_supports_sdpa")
            found[id(config)] = Attention(
                implementation=implementation,
                has_sdpa=has_sdpa if isinstance(has_sdpa, bool) else None,
                needs_eager=needs_eager(config),
                **known,
            )
        elif kind not in asked and calls_torchs_own(module):
            found[id(kind)] = Attention(implementation="sdpa", has_sdpa=True, needs_eager=None, **known)
        asked.add(kind)
    return tuple(found.values())


def is_followed(place: Place, config: Any) -> bool:
    """Tell if an attention module below has this configuration, or none."""
    return any(
        "Attention" in type(module).__name__
        and not is_a(module, nn.MultiheadAttention)
        and state_of(module).get("config", config) is config
        for _, module in modules_of(place.module)
        if module is not place.module
    )


def needs_eager(config: Any) -> str | None:
    """Name a setting that torch's attention lacks, such as Gemma 2's ``attn_logit_softcapping``."""
    if read(config, "output_attentions") is True:
        return "output_attentions=True"
    caps = ((name, value) for name, value in state_of(config).items() if re.search(r"att.*softcap", name))
    return next((f"{name}={value}" for name, value in caps if value is not None), None)


def calls_torchs_own(module: nn.Module) -> bool:
    """Tell if a module's own forward names torch's attention, outside transformers."""
    if is_a(module, nn.MultiheadAttention):
        return True
    *_, inner = chain(forward_of(module))
    names = getattr(read(read(inner, "__func__", inner), "__code__"), "co_names", ())
    return "scaled_dot_product_attention" in names and not home(type(module)).startswith("transformers.")


def examine_cache(tree: Tree, arguments: Any) -> dict[str, Any]:
    """Return if every training forward builds a KV cache, its switch and its holder, as in `Training`.

    A decoder of transformers builds one if ``config.use_cache`` is on (4.57 to 5.23), unless it checkpoints
    or a Trainer switches it off (5.23). Encoders, encoder-decoders, which drop it with labels, and models
    with a state of their own (Mamba) build none. None without a decoder.
    """
    models = [place for place in tree.places if PRETRAINED in place.lineage]
    decoders = [place for place in models if any(name == "GenerationMixin" for _, name in place.lineage)]
    makers = [
        place
        for place in models
        if not read_class(type(place.module), "_is_stateful")
        and read(read(place.module, "config"), "is_encoder_decoder") is not True
    ]
    if not any(place in makers for place in decoders):
        return {"use_cache": None, "cache_switch": None, "cache_holder": None}
    settings = state_of(arguments)
    off = settings.get("use_cache") is False
    checkpointed = settings.get("gradient_checkpointing") or settings.get("activation_checkpointing")
    asking = [each.name for each in makers if read(read(each.module, "config"), "use_cache") is True]
    flagged = any(huggingface_flag(place.module) for place in tree.places)
    in_force = bool(asking) and not off
    return {
        "use_cache": in_force and not (checkpointed or flagged),
        "cache_switch": asking[0] if in_force else None,
        "cache_holder": asking[-1] if in_force else None,
    }
