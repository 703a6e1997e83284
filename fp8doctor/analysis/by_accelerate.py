"""FP8 switched on through Accelerate, by lines that keep every layer learning."""

from __future__ import annotations

from collections.abc import Mapping

from fp8doctor.facts import Facts

ALL_GATHER = "ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER"
"""Where Accelerate reads whether it wraps torchao's weights for FSDP2; on by default. The wrapped weights are
new Parameters, which an optimizer made before ``prepare`` does not hold. Source: ``AORecipeKwargs``,
accelerate 1.13 to 1.15."""

BACKEND = "ACCELERATE_FP8_BACKEND"

ORDINARY = "Float8LinearConfig(pad_inner_dim=True)"
"""Accelerate's default but for the wrapped weights."""


def settings(facts: Facts, **asked: str) -> dict[str, str]:
    """Return the variables that ask for FP8, with the one that keeps torchao's weights ordinary if it is due.

    It is not if FSDP shards the model, if it is set, or if another backend converts.
    """
    accelerate, distributed = facts.accelerate(), facts.get("training.distributed")
    sharded = bool(distributed and (distributed.get("wrapper") or "").startswith("FSDP"))
    sharded = sharded or bool(accelerate and accelerate.get("distributed") == "FSDP")
    variables: Mapping[str, str] = facts.variables() | asked
    due = not sharded and ALL_GATHER not in variables and variables.get(BACKEND) not in ("TE", "MSAMP")
    return asked | ({ALL_GATHER: "false"} if due else {})


def exported(facts: Facts, **asked: str) -> str:
    """Write the shell line that sets these variables, and the one that is due."""
    return "export " + " ".join(f"{name}={value}" for name, value in settings(facts, **asked).items())


def in_script(facts: Facts, *, config: str = "", takes: str = "") -> str:
    """Write the Accelerator that converts with this config what ``takes``, a condition, lets through."""
    config = config or (ORDINARY if settings(facts) else "")
    arguments = [f"config={config}"] if config else []
    arguments += [f"module_filter_func=lambda layer, name: {takes}"] if takes else []
    recipe = f", kwargs_handlers=[AORecipeKwargs({', '.join(arguments)})]" if arguments else ""
    return f'accelerator = Accelerator(mixed_precision="fp8"{recipe})'
