"""Settings for FP8 that nothing reads."""

from __future__ import annotations

from fp8doctor import kit

UNREAD = {"FP8_BACKEND": "TE, AO or MSAMP", "FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER": "true or false"}
"""Names as LLaMA-Factory sets them -> values of those that Accelerate reads, with ACCELERATE_ in front."""


@kit.check(
    "ENV001",
    "fp8-setting-without-effect",
    severity="warning",
    was="ENV002",
    explained_by=("fp8-backend-misspelled",),
    changes_fp8=True,
)
def fp8_setting_without_effect(facts: kit.Facts) -> kit.Finding | kit.NotApplicable | None:
    variables = facts.environment.variables
    written = [name for name in UNREAD if name in variables]
    if not written:
        return kit.NotApplicable(reason="no FP8 setting that Accelerate reads by another name")
    idle = [name for name in written if f"ACCELERATE_{name}" not in variables]
    settings = [f"{name}={variables[name]}" for name in idle]
    why = [f"Accelerate reads ACCELERATE_{name} instead." for name in idle]
    lines = [f"unset {name}   # or export ACCELERATE_{name}: {UNREAD[name]}" for name in idle]
    if not settings:
        return None
    return kit.Finding(
        title=f"Nothing reads {' or '.join(settings)}",
        explanation=" ".join(why),
        evidence={"settings": tuple(settings)},
        treatment=kit.Treatment(
            name="use-settings-that-are-read",
            summary="use the name that Accelerate reads, or delete the setting",
            code="\n".join(lines),
        ),
    )
