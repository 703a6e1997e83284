"""The whole trial on a CPU: every arm proven and timed, and the user's job left as it was."""

from collections.abc import Callable

import pytest
import torch

from fp8doctor.facts import Workload
from fp8doctor.facts.arm_names import Reason
from fp8doctor.trial.copies.step import Variant, VariantPlan
from fp8doctor.trial.measure import timer
from tests.trial.decoder import AS_IS, BF16, PRESCRIBED, Decoder, job, run, trial
from tests.trial.planted import CLOCK, STEP_MS, Ticking

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("few_rounds")]


def test_every_arm_carries_its_proof() -> None:
    arms = run(job(), AS_IS, BF16, PRESCRIBED)
    assert {name: (arm.tried, arm.fp8_gemms, arm.graphs_run) for name, arm in arms.items()} == {
        "as_is": (True, 12 * 2 * 3, 0),
        "bf16": (True, 0, 0),
        "prescribed": (True, 12 * 2 * 3, 12),
    }
    assert [dict(cut.blocks) for cut in arms["as_is"].cuts] == [{"blocks": 4}, {"blocks": 12}]
    assert len(arms["as_is"].rounds_ms) >= timer.LEAST_ROUNDS
    shallow, deep = (cut.step_ms for cut in arms["as_is"].cuts)
    by_medians = deep + (26 - 12) * (deep - shallow) / 8  # type: ignore[operator]
    assert arms["as_is"].low_ms <= by_medians <= arms["as_is"].high_ms  # type: ignore[operator]
    assert arms["as_is"].low_ms <= arms["as_is"].step_ms <= arms["as_is"].high_ms  # type: ignore[operator]


def slowed(share: float) -> Callable[[Variant], Variant]:
    """BF16 with a forward that takes so much longer."""

    def make(variant: Variant) -> Variant:
        variant = BF16.make(variant)
        forward = variant.model.forward

        def slow(tokens: torch.Tensor) -> torch.Tensor:
            CLOCK.now_s += share * STEP_MS / 1e3
            return forward(tokens)

        variant.model.forward = slow  # type: ignore[method-assign]
        return variant

    return make


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize(("share", "reliable"), [(0.01, True), (0.03, False)])
def test_a_copy_that_differs_makes_the_trial_unreliable(share: float, reliable: bool) -> None:
    slow = VariantPlan("slow", slowed(0.10), fp8=False)
    again = VariantPlan("bf16_again", slowed(share), fp8=False, base="bf16")
    result = trial(job(model=Ticking(3).bfloat16()), BF16, slow, again)
    assert [arm.step_ms for arm in result.arms] == pytest.approx([STEP_MS, 1.10 * STEP_MS])
    assert result.self_check_ratio == pytest.approx(1 / (1 + share))
    assert result.reliable is reliable
    assert ("against its own copy" in (result.reason or "")) is not reliable


class SkippingAtRandom(Ticking):
    """As with LayerDrop, a forward takes as long as random numbers of the process have it."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.share = 1.0 + torch.rand([]).item()
        return super().forward(tokens)


@pytest.mark.usefixtures("clock")
def test_variants_that_skip_layers_at_random_skip_the_same_ones() -> None:
    again = VariantPlan("bf16_again", BF16.make, fp8=False, base="bf16")
    result = trial(job(model=SkippingAtRandom(3).bfloat16()), BF16, again)
    assert result.self_check_ratio == pytest.approx(1.0, abs=1e-9)
    assert len({*result.arms[0].rounds_ms}) > 1


class Skipping(Decoder):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks[0](self.embedding(tokens)))


def test_a_cut_whose_blocks_do_not_all_run_is_refused() -> None:
    result = trial(job(model=Skipping(26).bfloat16()), AS_IS)
    assert result.why is Reason.NOT_REPLICABLE
    assert "does not run all of them (3 are skipped)" in (result.reason or "")


class SkippingInTurn(Decoder):
    """Skips one block in each forward, as LayerDrop does at random."""

    turn = 0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.turn += 1
        hidden = self.embedding(tokens)
        for number, block in enumerate(self.blocks):
            hidden = hidden if number == self.turn % len(self.blocks) else block(hidden)
        return self.head(hidden)


def test_a_cut_whose_blocks_run_in_some_step_is_timed() -> None:
    result = trial(job(model=SkippingInTurn(26).bfloat16()), BF16)
    assert result.arms[0].tried


def test_a_users_optimizer_keeps_its_settings_and_state_and_accumulation_multiplies_the_work() -> None:
    of = job(blocks=3, workload=Workload(accumulate=3))
    of.optimizer = torch.optim.SGD(
        [{"params": of.model.blocks.parameters(), "momentum": 0.5}, {"params": of.model.head.parameters()}],
        lr=0.1,
    )
    before = of.optimizer.state_dict()
    assert run(of, AS_IS)["as_is"].fp8_gemms == 3 * 3 * 2 * 3
    assert of.optimizer.state_dict() == before
