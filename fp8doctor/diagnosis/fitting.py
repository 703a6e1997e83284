"""Changes that make a job fit into its GPU's memory, by the estimated peak."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence

from msgspec.structs import replace

from fp8doctor.analysis.activations import GIB
from fp8doctor.analysis.compile_coverage import cache_off
from fp8doctor.analysis.layers import in_python
from fp8doctor.analysis.memory import BYTES, Fit, Peak, fit
from fp8doctor.analysis.treatment_table import CHECKPOINTING_OFF, LARGER_BATCH, MORE_TOKENS, after
from fp8doctor.cost.step_cost import in_bf16, with_each
from fp8doctor.diagnosis.document import Step
from fp8doctor.diagnosis.estimate import changes_fp8, is_modelled, stays_in_bf16
from fp8doctor.diagnosis.treatments import optimizer_in_8_bits
from fp8doctor.facts import Facts, Linear, Network, if_recorded
from fp8doctor.finding import Treatment
from fp8doctor.recipes import stack_of
from fp8doctor.wording import plural

LEAST_SHARE = 0.05
"""Share of the GPU's memory that a change has to free to be worth its lines. A choice."""

MOST_GPUS = 1024
"""GPUs up to which a count is looked for. A choice."""

After = tuple[Treatment, Peak] | None
"""A change and the peak after it; None if it does not apply."""

MORE_MEMORY = frozenset({LARGER_BATCH, MORE_TOKENS, CHECKPOINTING_OFF})
"""Treatments that no job needs that does not fit."""


def within_memory(steps: Sequence[Step], facts: Facts) -> Sequence[Step]:
    """Drop what needs more memory if the job does not fit, as it is or with all of these fixes."""
    found = (if_recorded(fit, job) for job in (facts, _with_fixes(steps, facts)))
    if any(each and each.may_be_too_large for each in found):
        return [step for step in steps if step.treatment.name not in MORE_MEMORY]
    return steps


def fitted(steps: Sequence[Step], facts: Facts) -> Iterator[Step]:
    """Put what else makes a job fit before all, drop what that rules out, and say what the fixes leave."""
    now, fixed = if_recorded(fit, facts), _with_fixes(steps, facts)
    made = to_fit(fixed) if now and now.may_be_too_large else []
    for treatment, peak in made:
        title = "The estimated peak does not fit into the GPU's memory"
        yield Step(code="", mends=(), title=title, treatment=treatment, peak_gib=peak.gib)
    stored = any(treatment is BASE_IN_4_BITS for treatment, _ in made)
    then = if_recorded(fit, fixed) if now and now.may_be_too_large and not made else None
    last = next(filter(is_modelled, reversed(steps)), None)
    for step in (each for each in steps if not (stored and changes_fp8(each))):
        yield replace(step, peak_gib=then.now.gib) if then and step is last else step


def _with_fixes(steps: Iterable[Step], facts: Facts) -> Facts:
    if stays_in_bf16(steps := tuple(steps)):
        return if_recorded(in_bf16, facts) or facts
    return if_recorded(after, facts, [step.treatment for step in steps]) or facts


def to_fit(facts: Facts) -> list[tuple[Treatment, Peak]]:
    """Choose the fewest changes with which the estimated peak fits, each with the peak after it.

    Several GPUs come last, for what nothing makes fit one. Nothing if it fits now, or is unknown.
    """
    found = if_recorded(fit, facts)
    if found is None or not found.may_be_too_large:
        return []
    for count in range(1, len(CHANGES) + 1):
        for changes in itertools.combinations(CHANGES, count):
            made = _with(changes, facts, found)
            if len(made) == count and found.holds(made[-1][1]):
                return made
    return _with((*CHANGES, shards), facts, found)


def _with(changes: Iterable[Change], facts: Facts, found: Fit) -> list[tuple[Treatment, Peak]]:
    made, peak = list[tuple[Treatment, Peak]](), found.now
    for change in changes:
        after = if_recorded(change, facts, found, peak)
        if after and after[1].gib < peak.gib - LEAST_SHARE * found.gpu_gib:
            made.append(after)
            peak = after[1]
    return made


def smaller_batch(facts: Facts, found: Fit, peak: Peak) -> After:
    peak, batch = peak._replace(accumulates=True), found.batch
    most = peak.samples(found.gpu_gib, batch)
    if not most or not batch or most >= batch:
        return None
    count = math.ceil(batch / most)
    code = f"batch_size = {most}   # from {batch}\ngradient_accumulation_steps = {count}   # times yours"
    summary = f"use micro-batches of {plural(most, 'sample')} and accumulate their gradients"
    after = peak._replace(activations=(peak.activations or 0.0) * most / batch)
    return Treatment(name="smaller-batch", summary=summary, code=code), after


def checkpointing_on(facts: Facts, found: Fit, peak: Peak) -> After:
    """Checkpoint every block: it keeps its input, and one block at a time its activations."""
    network, forms = facts.network, facts.training.checkpointing
    if not network.blocks or any(each.active for each in forms):
        return None
    lists = "|".join(re.escape(each.name) for each in network.blocks)
    in_block = re.compile(rf"(?:{lists})\.\d+(?=\.)")

    def checkpointed(linear: Linear) -> Linear:
        block = in_block.match(linear.name)
        return replace(linear, checkpointed=block[0] if block else None)

    then = fit(with_each(facts, checkpointed))
    if then is None or then.now.activations is None:
        return None
    if any(each.form == "huggingface" for each in forms):
        code = f"{in_python('gradient_checkpointing_enable', network)}()\n{cache_off(facts)}"
    else:
        te = any(stack_of(each).under_autocast for each in network.fp8)
        code = "\n".join(
            f"for i, block in enumerate({at}):\n"
            f"    {at}[i] = checkpoint_wrapper(block{', checkpoint_fn=te.checkpoint' if te else ''})"
            for at in (in_python(each.name, network) for each in network.blocks)
        )
    treatment = Treatment(name="checkpointing-on", summary="checkpoint the blocks", code=code)
    kept = {name: getattr(then.now, name) for name in ("fp8_copies", "activations", "dequantized")}
    return treatment, peak._replace(**kept)


def smaller_optimizer(facts: Facts, found: Fit, peak: Peak) -> After:
    element = max((BYTES.get(each, 1) for each in facts.network.dtypes), default=2)
    treatment = optimizer_in_8_bits(facts)
    return (treatment, peak._replace(optimizer=peak.optimizer / element)) if treatment else None


BASE_IN_4_BITS = Treatment(
    name="base-in-4-bits",
    summary="store the frozen base in 4 bits, or 8 bits, and leave FP8 training off",
    code="# where the base is loaded, before LoRA\n"
    "config = BitsAndBytesConfig(load_in_4bit=True)\n"
    "# and no conversion to FP8: it needs weights in 16 or 32 bits",
)


def base_in_fewer_bits(facts: Facts, found: Fit, peak: Peak) -> After:
    """Store the frozen Linears of a job that trains few parameters in 4 bits."""
    if trains_most(facts.network):
        return None
    frozen = (each for each in facts.network.linears if each.requires_grad is False)
    wide = [each for each in frozen if each.dtype.startswith(("float", "bfloat", "int8"))]
    freed = sum((BYTES.get(each.dtype, 1) - 0.5) * each.parameters for each in wide) / GIB
    freed /= facts.get("training.distributed.shards") or 1
    return BASE_IN_4_BITS, peak._replace(weights=peak.weights - freed)


def trains_most(network: Network) -> bool:
    return network.trainable_parameters >= network.parameters / 2


def shards(facts: Facts, found: Fit, peak: Peak) -> After:
    """Shard weights, gradients and optimizer state over as few GPUs as it takes."""
    for count in range(2, MOST_GPUS + 1):
        parts = {name: getattr(peak, name) / count for name in ("weights", "gradients", "optimizer")}
        after = peak._replace(**parts)
        if found.holds(after):
            loops = (in_python(each.name, facts.network) for each in facts.network.blocks)
            lines = [f"for block in {each}:\n    fully_shard(block)" for each in loops]
            code = "\n".join(
                ("# after FP8 and torch.compile, before the optimizer", *lines, "fully_shard(model)")
            )
            summary = f"shard the model over {count} GPUs (FSDP2)"
            summary += ", or train adapters (LoRA)" * trains_most(facts.network)
            return Treatment(name="shard", summary=summary, code=code), after
    return None


Change = Callable[[Facts, Fit, Peak], After]

CHANGES: tuple[Change, ...] = (smaller_batch, checkpointing_on, smaller_optimizer, base_in_fewer_bits)
"""What frees memory on one GPU, the one that changes least of the training first."""
