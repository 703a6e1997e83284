"""What a fix gains of a modelled step, and which recipe or batch would be faster."""

from typing import NamedTuple

from fp8doctor.analysis.layer_gain import first_that_pays, is_given
from fp8doctor.analysis.modelled_speedup import OFF, OFF_IN_BALANCE, as_modelled, modelled_speedup
from fp8doctor.analysis.treatment_table import after
from fp8doctor.cost.matmuls import all_tokens, step_tokens
from fp8doctor.cost.step_cost import UNCERTAINTY, ModelledStep, modelled_step, with_tokens
from fp8doctor.facts import Facts
from fp8doctor.finding import Saving, Treatment
from fp8doctor.gpus import modelled_gpu
from fp8doctor.recipes import BY_TREATMENT, Recipe, recipe_of, runs_on, stack_of


class HostBound(NamedTuple):
    """A modelled Transformer Engine step whose launches take longer than its kernels."""

    step: ModelledStep
    bf16_ms: float
    speedup: float
    pays_from: int | None
    """Tokens of a micro-batch from which FP8 pays; None if it does with none up to `MANY_TOKENS`."""


def modelled_host_bound(facts: Facts) -> HostBound | None:
    """Model a step of a user's batch that its host makes slower than BF16, by more than the model's error."""
    fp8, tokens = facts.network.fp8, step_tokens(facts)
    if not (fp8 and tokens and all(stack_of(linear).own_kernels for linear in fp8) and is_given(facts)):
        return None
    step, found = modelled_step(facts), modelled_speedup(facts)
    if step is None or found is None or found.now is None:
        return None
    least = 1 + UNCERTAINTY
    if step.host_ms < step.busy_ms * least or found.now.value * least > 1:
        return None

    def speedup_with(tokens: int) -> float:
        then = modelled_speedup(with_tokens(facts, tokens))
        return then.now.value if then and then.now else 0.0

    pays = first_that_pays(tokens, speedup_with)
    return HostBound(step, found.bf16_ms, found.now.value, pays and pays[0])


class Fixed(NamedTuple):
    """A modelled step, and the same with a fix, for as many tokens."""

    now: ModelledStep
    then: ModelledStep

    @property
    def speedup(self) -> float:
        return self.now.step_ms / self.then.step_ms

    @property
    def gains(self) -> bool:
        """Return whether the fix gains more than the model's error."""
        return self.speedup - 1 >= (OFF_IN_BALANCE if self.now.in_balance else OFF)

    @property
    def saving(self) -> Saving:
        off = OFF_IN_BALANCE if self.now.in_balance else UNCERTAINTY
        ms = self.now.step_ms - self.then.step_ms
        return Saving(low=ms * (1 - off), high=ms * (1 + off), basis="modelled", gpu=self.now.gpu)


def modelled_steps(facts: Facts, fix: Treatment) -> Fixed | None:
    """Model the step with and without a fix; None without numbers, or if the model does not know the fix."""
    known = as_modelled(facts)[0]
    fixed = after(known, [fix])
    now, then = (None if fixed == known else modelled_step(each) for each in (known, fixed))
    return Fixed(now, then.scaled(all_tokens(known) / all_tokens(fixed))) if now and then else None


def faster_recipe(facts: Facts) -> tuple[Recipe, Fixed] | None:
    """Return the fastest other recipe of the job's stack, if it gains more than the model's error."""
    gpu, mine = modelled_gpu(facts), recipe_of(facts.network.fp8[0])
    others = [each for each in BY_TREATMENT.values() if each.stack == mine.stack and each.name != mine.name]
    found = list[tuple[Recipe, Fixed]]()
    for each in others:
        if gpu is not None and runs_on(each, gpu.capability):
            steps = modelled_steps(facts, Treatment(name=each.treatment, summary="", code=""))
            found += [(each, steps)] if steps and steps.gains else []
    return max(found, key=lambda each: each[1].speedup, default=None)
