"""`plan`: estimate what FP8 would give, by GPU and recipe, before there is a run."""

import logging
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import asdict

from fp8doctor.errors import UserError, in_one_sentence
from fp8doctor.facts import Facts, Target
from fp8doctor.loading.config_model import checked, config_job, is_config, read_config
from fp8doctor.planning.job_options import Options, saved_facts
from fp8doctor.planning.plan_document import PlanDocument, plan_document
from fp8doctor.render.command_pages import plan_page
from fp8doctor.render.page import Page
from fp8doctor.report import Shown


class Plan(Shown, PlanDocument, frozen=True, kw_only=True):
    """A plan that can be shown and saved."""

    def page(self) -> Page:
        return plan_page(self)

    def _line(self) -> str:
        return self.answer


@in_one_sentence
def plan(
    config: Any,
    gpus: str | Sequence[str] = ("H100",),
    *,
    batch: int | None = None,
    seq: int | None = None,
    dp: int = 1,
    tp: int = 1,
    cp: int = 1,
    pp: int = 1,
    ep: int = 1,
    accumulate: int | None = None,
    sharding: str = "fsdp",
    checkpointing: str | None = None,
    fused_loss: bool = False,
    lora: int | None = None,
    lora_modules: Sequence[str] = (),
    optimizer: str = "adamw",
    stack: str | None = None,
    recipe: str = "all",
    step_ms: float | None = None,
) -> Plan:
    """Estimate a training job in BF16 and FP8 on these GPUs, without a GPU or weights.

    ``config`` is a path to a config.json, a checkpoint's folder or a saved report; a name that transformers
    knows; a mapping, a configuration of transformers, or an nn.Module. The other arguments are those of
    `Options`; None is what the model or the report says.

    Raises `UserError`, a ValueError of one sentence, for what cannot be planned.
    """
    given = {name: value for name, value in locals().items() if name in Options.__struct_fields__}
    given["lora_modules"] = lora_modules.split(",") if isinstance(lora_modules, str) else lora_modules
    level = logging.root.manager.disable
    with warnings.catch_warnings(action="ignore"):  # of libraries that transformers loads, such as torchao
        logging.disable(max(level, logging.WARNING))
        try:
            facts = facts_of(config, batch, seq)
        finally:
            logging.disable(level)
    return Plan(**asdict(plan_document(facts, gpus, given)))


def facts_of(config: Any, batch: int | None, seq: int | None) -> Facts:
    """Examine what a plan is asked for. Raises `UserError`."""
    from fp8doctor.examine import examine

    if isinstance(config, Facts):
        return config
    if hasattr(config, "to_dict") and hasattr(config, "model_type"):
        config = config.to_dict()
    if isinstance(config, Mapping):
        name = str(config.get("model_type", "configuration"))
        return examine(config_job(checked(config, name), name, batch=batch, seq=seq))
    if isinstance(config, (str, Path)):
        if (saved := saved_facts(Path(config))) is not None:
            return saved
        if not is_config(str(config)):
            raise UserError(f"fp8doctor.plan() does not run model files such as {config}; pass the model")
        return examine(config_job(read_config(str(config)), Path(config).name, batch=batch, seq=seq))
    from fp8doctor.loading.synthetic_batch import job_of
    from fp8doctor.trial import without_forward

    if not hasattr(config, "named_modules"):
        raise UserError(
            f"a {type(config).__name__} cannot be planned; pass a path, a mapping or an nn.Module"
        )
    live = Target(kind="live", name=type(config).__name__, attribute=None)
    return without_forward(examine(job_of(config, live, size=batch, sequence=seq)))
