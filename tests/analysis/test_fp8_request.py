"""Who asked for FP8, by the variables of real launchers."""

from fp8doctor.analysis.fp8_request import asked_by_environment
from tests.checks.environment.test_fp8_request_overridden import IDLE, job
from tests.checks.rules import finding_of
from tests.programs import launched


def test_the_launcher_is_recognized_although_its_variable_was_rewritten() -> None:
    """transformers up to 4.57 writes bf16 into the variable; what the launcher wrote beside it stays."""
    rewritten = launched("--mixed_precision", "fp8") | {"ACCELERATE_MIXED_PRECISION": "bf16"}
    assert asked_by_environment(rewritten) is not None
    assert finding_of(IDLE, job(rewritten)) is None
    assert asked_by_environment(launched("--mixed_precision", "bf16", "--fp8_backend", "te")) is None
    assert asked_by_environment({"ACCELERATE_FP8_FORMAT": "E4M3"}) is None, "one variable is no launcher"
