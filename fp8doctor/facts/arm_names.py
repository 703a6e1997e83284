"""Names of arms and reasons that more than one room reads: what the trial writes, and checks, verdict and
renderers read."""

from __future__ import annotations

STEP_RAISES = "the training step raises "
"""How the reason of a trial begins whose model could be copied and whose own step failed."""


NO_TIME_LEFT = "was used up before it"


NOT_EXPECTED_TO_FIT = "would not have been enough for it"
"""How the reason of an arm ends for which the budget left no time."""


NO_FP8_GEMM = "no FP8 GEMM was seen in its step"
"""The reason of an arm whose FP8 layers ran none; `fp8doctor.trial.conductor` writes it."""


PRESCRIBED = "prescribed"
"""The arm of everything together that is prescribed: what findings proposed, and what the trial found beside
it."""


FIRST = "_first"
"""Behind the name of an arm that was timed again in the final window: what other arms of the first window are
compared with."""


COMBINATION = "combination"
"""Everything that gained, together, where the best of it alone is faster."""


SELF_CHECK = "bf16_again"
"""The arm that is a replica of another, to check the timing against; it copies the step as it is where there
is no eager BF16 arm."""


UNSEEN = "the profiler cannot be used here, and without it no FP8 GEMM of its can be seen"
"""The reason of an FP8 arm whose stack has no operators of its own."""
