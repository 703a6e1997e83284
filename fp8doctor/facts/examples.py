"""Facts for the two cases at the end of a check, in a line or two."""

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from fp8doctor.facts import (
    Arm,
    Breakdown,
    Environment,
    Facts,
    Linear,
    Network,
    Observation,
    Package,
    Software,
    Target,
    Training,
    Trial,
    Workload,
)

PARTS = {
    "network": Network,
    "training": Training,
    "trial": Trial,
    "workload": Workload,
    "environment": Environment,
    "software": Software,
    "observed": Observation,
    "target": Target,
}
"""Field of the facts -> its record. A name that several records have is the first one's."""

FLOAT8 = Linear(
    name="blocks.0.up",
    kind="torchao.float8.float8_linear.Float8Linear",
    stack="torchao",
    use="training",
    recipe="tensorwise",
    features={},
    in_features=1024,
    out_features=4096,
    gemms=1,
    dtype="bfloat16",
    weight_class=None,
    requires_grad=True,
    role="body",
    adapter=None,
    adapts=None,
    compiled=None,
    checkpointed=None,
    parameters=1024 * 4096,
    flops_share_pct=100.0,
)


def example(**fields: Any) -> Facts:
    """Build facts from any record's fields: ``example(linears=(), packages={"torchao": "0.18"})``."""
    owner = {field: part for part in reversed(PARTS) for field in PARTS[part].__struct_fields__}
    owner |= dict.fromkeys(Facts.__struct_fields__, "")
    if "packages" in fields:
        packages = fields["packages"].items()
        fields["packages"] = {name: Package(version=version, imported=True) for name, version in packages}
    given: dict[str, dict[str, Any]] = {}
    for name, value in fields.items():
        given.setdefault(owner[name], {})[name] = value
    whole = given.pop("", {})
    return Facts(**whole, **{part: PARTS[part](**values) for part, values in given.items()})


def float8(name: str = FLOAT8.name, **changes: Any) -> Linear:
    """Build a compilable Float8Linear of torchao, with these changes."""
    return replace(FLOAT8, name=name, **changes)


def variant(name: str, step_ms: float, **fields: Any) -> Arm:
    """Build a variant that took this time in each of six rounds."""
    return Arm(name=name, tried=True, step_ms=step_ms, rounds_ms=(step_ms,) * 6, **fields)


def profiled(name: str, families_ms: Mapping[str, float], idle_ms: float = 0.0, **parts: Any) -> Arm:
    """Build a variant of these kernels, in ms; ``parts`` are fields of its breakdown."""
    busy = sum(families_ms.values())
    breakdown = Breakdown(
        families_ms=dict(families_ms), idle_ms=idle_ms, busy_ms=busy, reliable=True, kernels=2000, **parts
    )
    return variant(name, busy + idle_ms, breakdown=breakdown, treatments=())
