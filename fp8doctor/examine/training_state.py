"""Read the training state: autocast, Accelerate, Trainer, optimizer, Dynamo, the caching allocator.

Reads only what is loaded, and creates no CUDA context.
"""

import gc
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from typing import Any

import torch
from msgspec.structs import replace
from torch import nn

from fp8doctor.examine.distributed import examine_distributed
from fp8doctor.examine.fp8_conversion import examine_conversion, examine_converter
from fp8doctor.examine.marks import chain
from fp8doctor.examine.module_facts import examine_cache
from fp8doctor.examine.walk import Tree
from fp8doctor.facts import NOT_RECORDED, Accelerate, Dynamo, Network, TrainerArguments, Training
from fp8doctor.loading.job import Job
from fp8doctor.recipes import TRANSFORMER_ENGINE, by_class
from fp8doctor.stacks import torch_private
from fp8doctor.stacks.code_names import from_library, named
from fp8doctor.stacks.looking import (
    class_name,
    forward_of,
    held_by,
    home,
    innermost,
    is_a,
    lineage,
    parameters_in,
    read,
    state_of,
    unwrapped,
    written_back,
)
from fp8doctor.stacks.tensors import whole_size
from fp8doctor.stacks.transformer_engine import autocast_is_open


def examine_training(tree: Tree, job: Job, gaps: dict[str, str]) -> Training:
    forward = forward_of(tree.root.module)
    arguments, optimizer = read(job.trainer, "args"), job.optimizer
    if optimizer is None and job.trainer is not None:
        optimizer = state_of(job.trainer).get("optimizer")
    found = [parameter for _, parameter in tree.parameters.values()]
    of_optimizer = examine_optimizer(optimizer, job.other_optimizers, tree, gaps)
    return Training(
        autocast=autocast_dtype(job, forward, found, gaps),
        autocast_within=autocast_within(tree, job, gaps),
        fp8_autocast=fp8_autocast(tree, job, gaps),
        gradients_seen=any(each.grad is not None for each in found),
        compile_marks=tuple(tree.marks),
        dynamo=examine_dynamo(gaps),
        checkpointing=tuple(tree.checkpointing),
        forward_chain=forward_chain(forward),
        accelerate=examine_accelerate(tree),
        distributed=examine_distributed(tree),
        trainer=trainer_arguments(arguments),
        **examine_cache(tree, arguments),
        layerdrop=layerdrop(tree),
        alloc_retries=examine_allocator(gaps),
        **of_optimizer,
        conversion=examine_conversion(tree, job.watched, gaps),
        converter=examine_converter(job.watched),
    )


def layerdrop(tree: Tree) -> float | None:
    """Return the largest probability that a block is skipped in training; None without any.

    Modules or their configurations have it (transformers 4.57 to 5.24).
    """
    names = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")
    own = [state_of(place.module) for place in tree.places]
    configs = {id(config): state_of(config) for each in own if (config := each.get("config")) is not None}
    found = (each.get(name) for each in (*own, *configs.values()) for name in names)
    return max((each for each in found if isinstance(each, float) and 0 < each < 1), default=None)


def autocast_dtype(job: Job, forward: Any, found: list[nn.Parameter], gaps: dict[str, str]) -> Any:
    """Return the step's autocast; ``NOT_RECORDED`` if no call of it was seen.

    The job's own, that of a decorator around the forward (torch 2.6 to 2.15), or one that is open now.
    """
    decorators = (held_by(link, "autocast_instance") for link in chain(forward))
    dtypes = [read(each, "fast_dtype") for each in decorators if read(each, "_enabled", True)]
    devices = sorted({each.device.type for each in found} & {"cpu", "cuda"}, reverse=True)
    dtypes += [torch.get_autocast_dtype(each) for each in devices if torch.is_autocast_enabled(each)]
    dtype = next((each for each in (job.autocast, *dtypes) if each is not None), None)
    if dtype is None and job.unseen:
        gaps["training.autocast"] = job.unseen
        return NOT_RECORDED
    return None if dtype is None else str(dtype).removeprefix("torch.")


def autocast_within(tree: Tree, job: Job, gaps: dict[str, str]) -> Any:
    """Return if a watched step opened an autocast; False if no code of the user's names one.

    Else ``NOT_RECORDED``.
    """
    if job.opens_autocast:
        return True
    if not any("autocast" in name for name, _ in _names_of_the_step(tree, job)):
        return False
    gaps["training.autocast_within"] = "the step's code names an autocast, and no forward was seen"
    return NOT_RECORDED


def _names_of_the_step(tree: Tree, job: Job) -> Iterator[tuple[str, Any]]:
    """Yield every name that the step's own code uses, with its value."""
    yield from named(job.training_step)
    own = {type(each.module): each.module for each in tree.places}
    for kind, module in own.items():
        if not from_library(kind):
            yield from named(forward_of(module), kind.__mro__)


def with_recipe_of_the_step(network: Network, tree: Tree, job: Job) -> Network:
    """Give Transformer Engine's layers that have not run the one recipe that the step's code names."""
    unseen = {
        each.name
        for each in network.get("linears", ())
        if each.stack == TRANSFORMER_ENGINE.name and each.get("recipe", "") is None and each.engaged is None
    }
    if not unseen:
        return network
    kinds = by_class(TRANSFORMER_ENGINE.name)
    names = (each for name, value in _names_of_the_step(tree, job) for each in (name, type(value).__name__))
    found = {kinds[each] for each in names if each in kinds}
    recipe = found.pop() if len(found) == 1 else None
    linears = (replace(each, recipe=recipe) if each.name in unseen else each for each in network.linears)
    return replace(network, linears=tuple(linears))


def fp8_autocast(tree: Tree, job: Job, gaps: dict[str, str]) -> Any:
    """Return if an FP8 autocast is open; None without Transformer Engine's layers.

    ``NOT_RECORDED`` if only a step shows it, with a gap if the step is unknown.
    """
    kinds = {type(module) for place in tree.places for module in place.modules}
    if not any(home(each).startswith("transformer_engine.") for each in kinds):
        return None
    if job.around is not nullcontext or autocast_is_open():
        return True
    if job.training_step is None:
        gaps["training.fp8_autocast"] = (
            "who trains this model, inside te.autocast or not, is told by no training_step"
        )
    elif any(name == "LightningModule" for _, name in lineage(type(tree.root.module))):
        gaps["training.fp8_autocast"] = "Lightning opens te.autocast around the step if its precision says so"
    return NOT_RECORDED


def forward_chain(forward: Any) -> tuple[str, ...]:
    """Name a forward's wrappers by their code, because ``functools.wraps`` hides it."""
    *wrappers, _ = (read(link, "__func__", link) for link in chain(forward))
    codes = [(each, read(each, "__code__")) for each in wrappers]
    return tuple(
        class_name(type(each))
        if code is None
        else f"{each.__globals__.get('__name__', '')}.{code.co_qualname}"
        for each, code in codes
    )


def trainer_arguments(arguments: Any) -> TrainerArguments | None:
    """Read a Trainer's arguments from their fields; no property runs."""
    if arguments is None:
        return None
    settings = state_of(arguments)
    checkpointing = settings.get("activation_checkpointing", settings.get("gradient_checkpointing"))
    return TrainerArguments(
        kind=class_name(type(arguments)),
        bf16=settings.get("bf16"),
        fp16=settings.get("fp16"),
        mixed_precision=settings.get("mixed_precision"),
        checkpointing=checkpointing,
    )


def examine_accelerate(tree: Tree | None) -> Accelerate | None:
    """Read Accelerate's state, or None; without a tree, nothing about a model."""
    module = sys.modules.get("accelerate.state")
    kinds = (getattr(module, name, None) for name in ("AcceleratorState", "PartialState"))
    shared, process = (getattr(kind, "_shared_state", {}) for kind in kinds)
    if not shared and not process:
        return None
    waits = getattr(sys.modules.get("accelerate.accelerator"), "Accelerator", ())
    state = Accelerate(
        mixed_precision=_word(shared.get("_mixed_precision")),
        distributed=_word(shared.get("distributed_type", process.get("distributed_type"))),
        may_prepare=any(is_a(each, waits) and not vars(each).get("_models") for each in gc.get_objects()),
    )
    if tree is None:
        return state
    prepared = (state_of(each).get("_is_accelerate_prepared", False) for each in tree.root.modules)
    return replace(state, prepared=any(prepared))


def _word(value: Any) -> str | None:
    value = getattr(value, "value", value)
    return None if value is None else str(value)


def examine_optimizer(
    optimizer: Any, others: Sequence[Any], tree: Tree, gaps: dict[str, str]
) -> dict[str, Any]:
    """Return its class, if it has stepped, and the trainable parameters in no optimizer's groups.

    These are unknown if it may hold copies of them, as torchao's CPU offload does. Muon takes only matrices,
    and another optimizer the rest.
    """
    if optimizer is None:
        none = dict.fromkeys(("optimizer", "optimizer_stepped", "parameters_outside_optimizer"))
        return none | {"first_outside_optimizer": ()}
    inner = unwrapped(optimizer)
    inside = {id(each) for of in (inner, *map(unwrapped, others)) for each in parameters_in(of)}
    if innermost(inner) is not inner:
        inside |= {id(each) for each in written_back(inner)}
    shaped = [
        (name, each) for name, each in tree.parameters.values() if not is_a(each, nn.UninitializedParameter)
    ]
    trainable = [(name, id(each)) for name, each in shaped if each.requires_grad and whole_size(each)]
    left_out = [name for name, key in trainable if key not in inside]
    kind = class_name(type(inner))
    copies = len(left_out) == len(trainable) and not kind.startswith("torch.optim.")
    outside: int = len(left_out)
    if left_out and (copies or kind.endswith(".Muon")):
        gaps["training.parameters_outside_optimizer"] = (
            f"{kind.rpartition('.')[2]} may hold copies of parameters, or leave some to another optimizer"
        )
        outside, left_out = NOT_RECORDED, []
    return {
        "optimizer": kind,
        "optimizer_stepped": bool(read(innermost(optimizer), "state")),
        "parameters_outside_optimizer": outside,
        "first_outside_optimizer": tuple(left_out[:5]),
    }


def examine_dynamo(gaps: dict[str, str]) -> Dynamo:
    """Read Dynamo's switch and counters, or its variable if it is not loaded."""
    config, frames = torch_private.config(), torch_private.counters("frames")
    if config is None:  # any value of the variable disables it before torch 2.8
        value = os.environ.get("TORCH_COMPILE_DISABLE")
        disabled = value == "1" if torch.__version__ >= "2.8" else bool(value)
        return Dynamo(disabled=disabled, frames_total=0, frames_ok=0)
    if frames is None:
        gaps["training.dynamo"] = "this torch keeps Dynamo's counters where 2.6 to 2.15 do not"
        frames = {}
    return Dynamo(
        disabled=bool(config.disable),
        frames_total=int(frames.get("total", 0)),
        frames_ok=int(frames.get("ok", 0)),
        recompile_limit=getattr(config, "recompile_limit", None) or config.cache_size_limit,  # of torch 2.6
    )


def compiled_nothing() -> bool:
    """Tell if Dynamo is on and has not tried to compile a frame.

    Frames loaded from packaged code are not counted, so False if there may be any.
    """
    state = examine_dynamo({})
    config, stance = torch_private.config(), getattr(torch_private.stance(), "stance", "default")
    switched = state.disabled or stance != "default" or os.environ.get("TORCHDYNAMO_DISABLE") == "1"
    tried = torch_private.frames_tried()
    packaged = getattr(config, "caching_precompile", False)
    return not (switched or tried or packaged or state.frames_total)


def examine_allocator(gaps: dict[str, str]) -> Any:
    """Count how often the allocator freed its cache and retried; ``NOT_RECORDED`` if it does not tell.

    None before CUDA is initialized. Only torch's native allocator counts: cudaMallocAsync always says zero,
    and a user's own raises.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    backend = torch.cuda.get_allocator_backend()
    if backend == "native":
        with suppress(RuntimeError, KeyError):
            devices = range(torch.cuda.device_count())
            return sum(torch.cuda.memory_stats(each)["num_alloc_retries"] for each in devices)
    gaps["training.alloc_retries"] = f"the allocator ({backend}) does not tell how often it retried"
    return NOT_RECORDED
