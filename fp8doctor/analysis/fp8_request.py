"""Requests for FP8 by environment, launcher, Accelerate, Trainer or code, and lines that ask Accelerate."""

from collections.abc import Mapping

from fp8doctor.facts import Accelerate, ArmName, Facts, TrainerArguments, Unrecorded, recorded
from fp8doctor.wording import plural


def accelerate_of_model(facts: Facts) -> Accelerate | None:
    """Return the Accelerator that prepared this model or may yet; None without one.

    If nobody recorded whether it may, it counts.
    """
    accelerate = facts.accelerate()
    if accelerate is None or accelerate.prepared:
        return accelerate
    return None if accelerate.get("may_prepare") is False else accelerate


def was_prepared(facts: Facts) -> bool:
    accelerate = facts.accelerate()
    return accelerate is not None and accelerate.prepared


NOT_FP8 = ("bf16", "no")
"""Precisions under which ``prepare`` converts nothing. On an old GPU the state of fp8 says fp16."""


def may_have_converted(facts: Facts) -> bool:
    """Return whether Accelerate's ``prepare`` may have converted this model."""
    precision = facts.get("training.accelerate.mixed_precision", "fp8")
    return was_prepared(facts) and precision not in NOT_FP8


def opens_te_autocast(facts: Facts) -> bool:
    """Return whether Accelerate may run this model's forward in an autocast of Transformer Engine.

    It does if this backend is set, whatever the precision. Source: ``Accelerator.fp8_backend``, 1.15.
    """
    chosen = facts.variables().get(BACKEND, "").upper() == "TE" and accelerate_of_model(facts) is not None
    return chosen or may_have_converted(facts)


def under_unsloth(facts: Facts) -> bool:
    """Return whether Unsloth is loaded.

    It gives layers a forward and backward of its own, and since 2026.10 compiles every block of a decoder by
    itself (``models/_block_compile.py``).
    """
    unsloth = facts.packages().get("unsloth")
    return bool(unsloth and unsloth.get("imported"))


def trains_in_16_bits(facts: Facts) -> bool:
    """Return whether Unsloth trains LoRA, which it multiplies in 16 bits (2026.10)."""
    return under_unsloth(facts) and bool(facts.get("network.adapter_parameters"))


LAUNCHER_FINGERPRINT = ("ACCELERATE_FP8_FORMAT", "ACCELERATE_FP8_MARGIN", "ACCELERATE_FP8_OPT_LEVEL")
"""``accelerate launch`` writes these together, whatever the backend, and only with ``--mixed_precision fp8``:
they stay when something rewrites ``ACCELERATE_MIXED_PRECISION``. A user who tunes one backend by hand sets
them one at a time. Source: ``setup_fp8_env`` in accelerate ``utils/launch.py``, read in 1.4.0, 1.8.1, 1.9.0
and 1.15.0."""


LAUNCHER_SETS = {"ACCELERATE_MIXED_PRECISION", "ACCELERATE_DYNAMO_MODE"}
"""Variables that it writes, but for DeepSpeed, whatever the precision. Source: the same file."""


def is_launched(facts: Facts) -> bool:
    """Return whether ``accelerate launch`` started the job, which writes over exported variables."""
    return any(facts.variables().keys() >= each for each in (LAUNCHER_SETS, {*LAUNCHER_FINGERPRINT}))


def fp8_was_asked_for(facts: Facts) -> str | None:
    """Name the source of the request for FP8; None if there is none, or it is unknown."""
    variables = facts.variables()
    asked = asked_by_environment(variables)
    if asked:
        return asked
    accelerate, trainer = accelerate_of_model(facts), facts.trainer()
    if accelerate and accelerate.mixed_precision == "fp8":
        return "Accelerator(mixed_precision='fp8')"
    if trainer and trainer.mixed_precision == "fp8":
        return "TrainingArguments"
    return None


def configured(facts: Facts) -> bool:
    """Return whether transformers' configuration of this model asks for FP8 weights."""
    return facts.get("network.quantization") in ("fp8", "fbgemm_fp8")


def precision_of(accelerate: Accelerate | None, trainer: TrainerArguments | None) -> str | None:
    """Find the precision in force: Accelerate's, else that of TrainingArguments.

    Under DeepSpeed, Accelerate's state says "no" for everything but fp8.
    """
    of_state, of_trainer = accelerate.mixed_precision if accelerate else None, None
    if trainer:
        of_trainer = trainer.mixed_precision or ("fp16" if trainer.fp16 else "bf16" if trainer.bf16 else None)
    if accelerate and accelerate.distributed == "DEEPSPEED" and of_state != "fp8":
        return of_trainer or of_state
    return of_state or of_trainer


def asked_by_environment(variables: Mapping[str, str]) -> str | None:
    """Name the variable or launcher that asks for FP8; None without one."""
    precision = variables.get("ACCELERATE_MIXED_PRECISION", "")
    if precision.lower() == "fp8":
        return f"ACCELERATE_MIXED_PRECISION={precision}"
    launched = variables.keys() >= set(LAUNCHER_FINGERPRINT)
    return "accelerate launch --mixed_precision fp8" if launched else None


def converted_nothing(facts: Facts) -> bool:
    """Return whether torchao's converter was seen to be called and replaced no layer."""
    converter = facts.get("training.converter")
    return converter is not None and converter.called is True and converter.replaced == 0


def autocast_of(facts: Facts) -> str | None:
    """Return the dtype of the step's autocast, or ``its own`` if it is unknown; None without one.

    Raises `Unrecorded` if that is not known: the step's code names an autocast, and no forward was seen.
    """
    if facts.training.autocast:
        return facts.training.autocast
    names_one = "training.autocast_within" in facts.get("gaps", {})
    known = names_one or recorded(facts, "training.autocast_within")
    return "its own" if known and facts.training.autocast_within else None


def lacks_autocast(facts: Facts) -> bool:
    try:
        return autocast_of(facts) is None
    except Unrecorded:
        return False


def runs_in_fp32(facts: Facts) -> bool:
    """Return whether most of the Linears' weights surely multiply in fp32.

    Accelerate brings an autocast of its own, but not for mixed precision ``no``. Raises `Unrecorded` if the
    Linears were not read.
    """
    accelerate = accelerate_of_model(facts)
    if (accelerate and accelerate.get("mixed_precision") != "no") or not lacks_autocast(facts):
        return False
    linears = facts.network.linears
    fp32 = sum(each.parameters for each in linears if each.multiplies_in == "float32")
    return 2 * fp32 > sum(each.parameters for each in linears)


ALL_GATHER = "ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER"
"""Where Accelerate reads whether it wraps torchao's weights for FSDP2; on by default. The wrapped weights are
new Parameters, which an optimizer made before ``prepare`` does not hold. Source: ``AORecipeKwargs``,
accelerate 1.13 to 1.15."""

BACKEND = "ACCELERATE_FP8_BACKEND"

BACKENDS = {"TE": "transformer_engine", "AO": "torchao", "MSAMP": "msamp", "NO": ""}
"""Accelerate's name of a backend -> its package. Source: ``FP8BackendType`` in accelerate 1.9 to 1.15."""

ORDINARY = "Float8LinearConfig(pad_inner_dim=True)"
"""Accelerate's default but for the wrapped weights."""


def asks_for_torchao(variables: Mapping[str, str]) -> bool:
    """Return whether Accelerate converts by torchao if it is asked for FP8: its default."""
    return variables.get(BACKEND, "").upper() not in ("TE", "MSAMP")


def settings(facts: Facts, **asked: str) -> dict[str, str]:
    """Return the variables that ask for FP8, with the one that keeps torchao's weights ordinary if it is due.

    It is not if FSDP shards, if it is off, or if another backend converts. ``accelerate launch`` sets it on.
    """
    accelerate, distributed = facts.accelerate(), facts.get("training.distributed")
    sharded = bool(distributed and (distributed.get("wrapper") or "").startswith("FSDP"))
    sharded = sharded or bool(accelerate and accelerate.get("distributed") == "FSDP")
    variables: Mapping[str, str] = facts.variables() | asked
    off = variables.get(ALL_GATHER, "").lower() in ("n", "no", "f", "false", "off", "0")
    due = not sharded and not off and asks_for_torchao(variables)
    return asked | ({ALL_GATHER: "false"} if due else {})


OF_LAUNCHER = ("ACCELERATE_MIXED_PRECISION", ALL_GATHER)
"""Variables that ``accelerate launch`` always sets, by flags of their names (``setup_fp8_env``, 1.15)."""


def exported(facts: Facts, launched: str = "", *, note: str = "", **asked: str) -> str:
    """Write the shell lines that set these variables, and the one that is due; ``launched`` by Accelerate."""
    launched = launched or "train.py" * is_launched(facts)
    given = settings(facts, **asked)
    own = [name for name in OF_LAUNCHER if launched and name in given]
    flags = [f" --{name.removeprefix('ACCELERATE_').lower()} {given.pop(name)}" for name in own]
    note = f"   # {note}" if note else ""
    lines = [f"export {' '.join(f'{name}={value}' for name, value in given.items())}{note}"] if given else []
    return "\n".join(lines + [f"accelerate launch{''.join(flags)} {launched}"] * bool(flags))


def in_script(facts: Facts, *, config: str = "", takes: str = "") -> str:
    """Write what lets Accelerate convert with this config what ``takes``, a condition, lets through."""
    config = config or (ORDINARY if settings(facts) else "")
    arguments = [f"config={config}"] if config else []
    arguments += [f"module_filter_func=lambda layer, name: {takes}"] if takes else []
    if not arguments:
        return 'accelerator = Accelerator(mixed_precision="fp8")'
    return with_handler(facts, f"AORecipeKwargs({', '.join(arguments)})")


HANDLERS = {"AORecipeKwargs": "ao_recipe_handler", "TERecipeKwargs": "te_recipe_handler"}
"""Class of a handler -> the attribute of an Accelerator (1.15) that keeps it until it converts."""


def with_handler(facts: Facts, handler: str) -> str:
    """Write the line that gives Accelerate a handler; a Trainer made its own, and converts when it trains."""
    if facts.trainer() and may_have_converted(facts):
        kept = HANDLERS[handler.partition("(")[0]]
        return f"trainer.accelerator.{kept} = {handler}   # before trainer.train()"
    return f'accelerator = Accelerator(mixed_precision="fp8", kwargs_handlers=[{handler}])'


def less_than_fp32_is_wanted(facts: Facts) -> str | None:
    """Say who wants FP8 or BF16 for this model; None before Accelerate's `prepare` puts it under autocast."""
    accelerate, fp8 = accelerate_of_model(facts), len(facts.network.fp8)
    if accelerate and accelerate.mixed_precision in ("bf16", "fp8"):
        return f"Accelerate prepared it for {accelerate.mixed_precision}" if accelerate.prepared else None
    if fp8:
        return f"The model has {plural(fp8, 'FP8 layer')}"
    timed = any(arm.name == ArmName.AS_IS and arm.step_ms for arm in facts.arms())
    return "The step was measured" if timed and facts.trial.device.startswith("cuda") else None
