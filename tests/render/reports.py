"""Reports whose screens must keep their shape, one of each kind."""

from msgspec.structs import replace

from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.diagnosis.document import Tool
from fp8doctor.facts import Environment, Facts, Gpu, Package, Software, Target
from fp8doctor.finding import Outcome
from fp8doctor.report import Report
from tests import replays
from tests.diagnosis.trials import without_fp8
from tests.facts_of import DECODER_468M

H200 = Gpu(name="NVIDIA H200", vendor="nvidia", compute_capability="9.0", memory_gib=139.8, visible=True)


def report(facts: Facts) -> Report:
    """The report of these facts, whatever the day and the version."""
    found = diagnose(facts, written_by=Tool(version="0.1.0"), created_at="2026-11-20T10:00:00+00:00")
    return Report.of(found)


def recorded(folder: str, name: str) -> Report:
    return report(replays.of(folder, name).report.facts)


EAGER_DECODER = report(replace(DECODER_468M, gaps={"gpus": "no GPU"}))
LORA = recorded("patients", "h200-lora")

ENVIRONMENT = report(
    Facts(
        target=Target(kind="environment", name="environment", attribute=None),
        software=Software(torch="2.11.0+cu130", packages={"accelerate": Package(version="1.15.0")}),
        environment=Environment(variables={"ACCELERATE_MIXED_PRECISION": "fp8"}),
        gpus=(H200, replace(H200, visible=False)),
        gaps={"network": "only the environment was asked for"},
    ),
)

_KILLED = report(
    Facts(
        target=Target(kind="file", name="train.py", attribute=None),
        software=Software(torch="2.13.0", packages={}),
        gpus=(),
        gaps={
            "network": "the worker was killed by SIGKILL (out of memory?) while loading train.py",
            "software.driver": "NVML is not installed",
        },
    ),
)
CRASHED = Outcome(code="ENV001", outcome="crashed", reason="KeyError: 'bf16'", area="environment")
BROKEN = replace(_KILLED, outcomes=(CRASHED, *(each for each in _KILLED.outcomes if each.code != "ENV001")))

FAILED_EARLY = report(
    replace(
        ENVIRONMENT.facts,
        target=Target(kind="script", name="train.py", attribute=None),
        gpus=(H200,),
        gaps={"network": "the script failed before its first step"},
        script_error="RuntimeError: Expected trailing dimension of mat1 to be divisible by 16 but got mat1 "
        "shape: (1003x64)",
    ),
)

SCREENS = {
    "failed_early": FAILED_EARLY,
    "eager_decoder": EAGER_DECODER,
    "lora": LORA,
    "no_fp8": report(without_fp8()),
    "environment": ENVIRONMENT,
    "on_a_gpu": recorded("patients", "h200-decoder_454m"),
    "watched": recorded("running", "h200x2-ddp_slow_rank"),
    "raises": recorded("patients", "h200-unaligned"),
    "broken": BROKEN,
}
