"""Compile blocks, layers or the model; run layers or the step in BF16; switch what a job has on or off."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fp8doctor.analysis.compile_coverage import has_unlike_sizes, is_below, is_inside, needs_compile
from fp8doctor.analysis.treatment_table import COMPILE_MODEL, has_fused_form
from fp8doctor.analysis.trial_view import TrialView
from fp8doctor.examine.marks import forward_of_torch, huggingface_flag
from fp8doctor.facts import Facts
from fp8doctor.facts.arm_names import BF16_BASELINES, ArmName
from fp8doctor.loading.job import Job
from fp8doctor.stacks import bf16_counterpart
from fp8doctor.stacks.looking import innermost, parameters_in
from fp8doctor.stacks.torch_private import (
    CHECKPOINTED_CHILD,
    behind_compile,
    compile_call,
    disabled,
    original,
)
from fp8doctor.trial.copies.compiling import give_wrappers_own_code, has_settings
from fp8doctor.trial.copies.step import Change, Variant
from fp8doctor.trial.treatments.apply import NotTried, TreatmentContext, modules, root_of, swap


def compile_it(variant: Variant, context: TreatmentContext) -> Variant:
    """Compile every block and the FP8 layers outside them; the whole model if it has no blocks."""
    if context.name == COMPILE_MODEL:
        return replace(variant, model=compile_blocks(variant.model, []))
    return replace(variant, model=block_by_block(variant.model, context.facts, outside_blocks(context.facts)))


def compile_layers(variant: Variant, context: TreatmentContext) -> Variant:
    """Compile the uncompiled FP8 layers outside the blocks; compiled modules stay as they are."""
    eager = {linear.name for linear in context.facts.network.linears if linear.compiled is None}
    if not _compile_named(variant.model, [name for name in outside_blocks(context.facts) if name in eager]):
        raise NotTried("it has no uncompiled FP8 layer outside its blocks")
    give_wrappers_own_code(variant.model)
    return variant


def outside_blocks(facts: Facts) -> list[str]:
    """Name FP8 layers outside the blocks that need the compiler, such as a converted head."""
    return [
        linear.name
        for linear in facts.network.linears
        if needs_compile(linear) and not any(is_inside(linear, blocks) for blocks in facts.network.blocks)
    ]


def block_by_block(model: nn.Module, facts: Facts, others: Sequence[str] = ()) -> nn.Module:
    """Compile every block and ``others`` without the KV cache, which would make each block another version.

    A model without blocks is compiled as a whole: one version serves it, with or without the cache.
    """
    lists = _lists_of(facts)
    if lists and facts.get("training.use_cache") is True:
        without_cache(model)
    settings = {"dynamic": False} if has_unlike_sizes(facts.network) else {}
    return compile_blocks(model, lists, others, **settings)


def compile_blocks(
    model: nn.Module, lists: Sequence[str], others: Sequence[str] = (), **settings: Any
) -> nn.Module:
    """Compile the lists' blocks and the ``others``, or the whole model without lists; return the model."""
    model = strip_compile_marks(model)
    if lists:
        if not _compile_named(model, _blocks_in(model, lists), **settings):
            raise NotTried(f"it has no blocks in {', '.join(lists)}")
        _compile_named(model, others, **settings)
    else:
        model = _compiled(model, **settings)
    give_wrappers_own_code(model)
    return model


def without_compile_marks(variant: Variant) -> Variant:
    """Remove every compile mark from the model and the training step."""
    return replace(variant, model=strip_compile_marks(variant.model), step_as_compiled=False)


def compiles_otherwise(model: nn.Module, facts: Facts) -> bool:
    """Return whether the user's compile marks differ from those of `block_by_block`."""
    known = facts.get("training.compile_marks", ())
    marks = {mark.name for mark in known if mark.get("compiles") is not False}
    if marks.issubset(linear.name for linear in facts.network.linears):
        return False  # they do nothing in a BF16 model
    root, lists = root_of(model)[1], _lists_of(facts)
    settings = has_settings(model) or has_unlike_sizes(facts.network)
    return marks != ({*_blocks_in(root, lists)} if lists else {""}) or settings


def _lists_of(facts: Facts) -> list[str]:
    return [blocks.name for blocks in facts.network.blocks]


def _blocks_in(model: nn.Module, lists: Sequence[str]) -> list[str]:
    held = ((name, each.named_children()) for name, each in modules(model).items() if name in lists)
    return [f"{name}.{child}".lstrip(".") for name, children in held for child, _ in children]


def _compile_named(model: nn.Module, names: Iterable[str], **settings: Any) -> bool:
    """Compile the modules with these names; return whether the model has any."""
    named = modules(model)
    there = [name.rpartition(".") for name in names if name in named]
    for above, _, child in there:
        named[above]._modules[child] = _compiled(named[above].get_submodule(child), **settings)
    return bool(there)


def _compiled(module: nn.Module, **settings: Any) -> Any:
    """Compile the module in place, or wrap it if Dynamo would skip the module's own frame."""
    if forward_of_torch(module):
        return torch.compile(module, **settings)
    module.compile(**settings)
    return module


def strip_compile_marks(model: nn.Module) -> nn.Module:
    """Remove every compile mark, in place; return the module inside if the root is a wrapper."""
    while (inside := behind_compile(model)) is not None:
        model = inside
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if (inside := behind_compile(child)) is not None:
                setattr(parent, name, inside)
    for module in model.modules():
        compile_call(module, None)
        own = module.__dict__.get("forward")
        if (eager := original(own)) is not None and not disabled(own):
            module.__dict__["forward"] = eager
        kind = type(module)
        if (decorated := original(kind.forward)) is not None and not disabled(kind.forward):
            attributes = {"forward": decorated, "__module__": kind.__module__}
            module.__class__ = type(kind.__name__, (kind,), attributes)
    return model


def keep_in_bf16(variant: Variant, context: TreatmentContext) -> Variant:
    """Leave the named layers in BF16, as a filter of the conversion would."""
    if not context.layers:
        raise NotTried("the finding names no layers")
    return replace(variant, model=to_bf16(variant.model, only=context.layers))


def stay_in_bf16(variant: Variant, context: TreatmentContext) -> Variant:
    """Leave no layer in FP8, in the plan's form of BF16; compiled if none was timed."""
    best = TrialView(context.facts).bf16_of_the_plan
    form = best.name if best and best.name in BF16_BASELINES else ArmName.BF16_COMPILED
    return in_form(form, context.facts)(variant)


def in_form(form: str, facts: Facts) -> Change:
    """Return the change that makes this form of BF16, of `BF16_BASELINES`."""

    def change(variant: Variant) -> Variant:
        bare = variant if form == ArmName.BF16_AS_COMPILED else without_compile_marks(variant)
        model = to_bf16(bare.model)
        if form == ArmName.BF16_AS_COMPILED:
            give_wrappers_own_code(model)
        elif form == ArmName.BF16_COMPILED:
            model = block_by_block(model, facts)
        elif form == ArmName.BF16_WHOLE:
            model = compile_blocks(model, [])
        missing = bare.autocast is None and mostly_fp32(model)
        return replace(bare, model=model, autocast=torch.bfloat16 if missing else bare.autocast)

    return change


def to_bf16(model: nn.Module, only: Collection[str] | None = None) -> nn.Module:
    """Replace FP8 training layers (all, or those in ``only``) by BF16 ones over the same Parameters.

    Raises `NoCounterpart`.
    """
    done = 0

    def counterpart(name: str, module: nn.Module) -> nn.Module | None:
        nonlocal done
        if only is not None and not belongs(name, only):
            return None
        found = bf16_counterpart(module)
        done += found is not None
        return found

    model = swap(model, counterpart)
    if only is not None and not done:
        raise NotTried("none of its layers is in FP8 in the part of the model that is timed")
    return model


def belongs(name: str, only: Collection[str]) -> bool:
    """Return whether ``only`` names the module, a part such as ``mlp.fc1``, or a module that holds it."""
    return bool(name) and any(is_below(each, name) or is_below(name, each) for each in only)


def autocast_bf16(variant: Variant, context: TreatmentContext) -> Variant:
    """Run forward and loss under autocast, and leave the parameters as they are."""
    if variant.autocast is not None:
        raise NotTried(
            f"the step runs under autocast already ({str(variant.autocast).removeprefix('torch.')})"
        )
    return replace(variant, autocast=torch.bfloat16)


def mostly_fp32(model: nn.Module) -> bool:
    sizes = [(parameter.dtype == torch.float32, parameter.numel()) for parameter in model.parameters()]
    return 2 * sum(size for fp32, size in sizes if fp32) > sum(size for _, size in sizes)


def adapters_to_bf16(variant: Variant, context: TreatmentContext) -> Variant:
    """Replace the adapters' fp32 Parameters, and write to none: other variants share them."""
    names = {linear.name for linear in context.facts.network.linears if linear.adapter == "adapter"}
    made: dict[int, nn.Parameter] = {}
    for name, module in modules(variant.model).items():
        inside = any(is_below(name, each) for each in names)
        for key, old in module._parameters.items() if inside else ():
            if old is not None and old.dtype == torch.float32:
                if id(old) not in made:
                    made[id(old)] = nn.Parameter(old.detach().bfloat16(), requires_grad=old.requires_grad)
                module._parameters[key] = made[id(old)]
    if not made:
        raise NotTried("it has no adapter in fp32")
    return variant


def attention_sdpa(variant: Variant, context: TreatmentContext) -> Variant:
    """Use torch's fused attention; transformers before 4.53 has no switch and reads the configuration."""
    holders: list[Any] = [module for module in variant.model.modules() if "config" in vars(module)]
    eager = [each for each in holders if getattr(each.config, "_attn_implementation", None) == "eager"]
    if not eager:
        raise NotTried("no configuration in it asks for eager attention")
    first = eager[0]
    if not getattr(type(first), "_can_set_attn_implementation", lambda: True)():
        raise NotTried(f"{type(first).__name__} takes its attention when it is built")
    switch = getattr(first, "set_attn_implementation", None)
    if callable(switch):
        try:
            switch("sdpa")
        except (ValueError, ImportError) as error:
            raise NotTried(f"transformers says: {str(error).strip().partition(chr(10))[0]}") from None
    for each in eager:
        each.config._attn_implementation = "sdpa"
    return variant


def cache_off(variant: Variant, context: TreatmentContext) -> Variant:
    if not without_cache(variant.model) and not context.facts.get("training.use_cache"):
        raise NotTried("no configuration in it asks for a cache")
    return variant


def without_cache(model: nn.Module) -> bool:
    found = [vars(module).get("config") for module in model.modules()]
    configs = [config for config in found if config is not None and getattr(config, "use_cache", False)]
    for config in configs:
        config.use_cache = False
    return bool(configs)


def checkpointing_off(variant: Variant, context: TreatmentContext) -> Variant:
    """Remove checkpoint wrappers and clear flags. transformers' KV cache, off meanwhile, stays off."""
    flagged: list[Any] = [module for module in variant.model.modules() if huggingface_flag(module)]
    for module in flagged:
        module.gradient_checkpointing = False
    if flagged:
        without_cache(variant.model)
    found = len(flagged)

    def inside(name: str, module: nn.Module) -> nn.Module | None:
        nonlocal found
        inner: Any = getattr(module, CHECKPOINTED_CHILD, None)
        found += inner is not None
        return inner if inner is None else swap(inner, inside)

    model = swap(variant.model, inside)
    if not found:
        raise NotTried("the model's own code calls checkpoint, which cannot be switched off from outside")
    return replace(variant, model=model)


def fused_optimizer(variant: Variant, context: TreatmentContext) -> Variant:
    if context.job is not None and not could_be_fused(context.job):
        raise NotTried("the optimizer is fused already, or has no fused form")
    return replace(variant, fused=True)


def could_be_fused(job: Job) -> bool:
    """Return whether torch can fuse the user's optimizer and does not."""
    optimizer = innermost(job.optimizer)
    kind = type(optimizer)
    if not has_fused_form(f"{kind.__module__}.{kind.__name__}"):
        return False
    if not all(each.is_floating_point() for each in parameters_in(optimizer)):
        return False  # complex ones
    return not any(group.get("fused") or group.get("differentiable") for group in optimizer.param_groups)
