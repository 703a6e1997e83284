"""Build a language model from a configuration, on the meta device: no weights, no GPU, no network."""

import copy
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fp8doctor.errors import UserError, require_torch
from fp8doctor.facts import Target
from fp8doctor.facts.record import UnreadableDocument, decode
from fp8doctor.files import regular
from fp8doctor.loading.job import Job, positive
from fp8doctor.wording import did_you_mean, error_in_words, escaped, quoted

SEQUENCE = 4096
"""Longest default sequence, if the model takes as many."""

MOST_LAYERS = 2048
"""More blocks than any public model has: a larger number is a mistake, and would take minutes to build."""

ONLY = "fp8doctor plans decoder language models from a configuration; for another model, name a model file"


def is_config(target: str) -> bool:
    path = Path(target)
    if path.is_dir():
        return not (path / "__init__.py").is_file()
    if path.suffix == ".json":
        return True
    if path.is_file() or ":" in target or path.suffix == ".py":
        return False
    return target.isidentifier() or not all(each.isidentifier() for each in target.split("."))


def read_config(target: str) -> dict[str, Any] | str:
    """Read a configuration file or a checkpoint's; a name is returned as it is. Raises `UserError`."""
    path = Path(target)
    if path.is_dir():
        names = ("config.json", "model_index.json", "adapter_config.json")
        held = next((path / name for name in names if (path / name).is_file()), None)
        if held is None:
            raise UserError(f"{escaped(target)} holds no config.json")
        path = held
    elif path.suffix != ".json":
        return target
    name = escaped(path.name)
    try:
        size = regular(path).st_size
        if size > 16 * 2**20:  # the largest of public models have under 1 MiB
            raise UserError(f"{name} has {size / 2**20:,.0f} MiB, too many for a configuration")
        data = decode(path.read_bytes())
    except OSError as error:
        raise UserError(f"cannot read {escaped(target)}: {error.strerror or error}") from None
    except UnreadableDocument as error:
        raise UserError(f"{name} cannot be read: {error}") from None
    if not isinstance(data, dict):
        raise UserError(f"{name} is JSON, but no configuration: it holds no keys")
    return checked(data, name)


def checked(data: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Refuse what is no configuration of a language model. Raises `UserError`."""
    if "_class_name" in data or "_diffusers_version" in data:
        raise UserError(f"{name} is of a diffusion model ({quoted(str(data.get('_class_name')))}); {ONLY}")
    if "peft_type" in data:
        raise UserError(f"{name} is of an adapter; name the base model, and give --lora RANK")
    if not isinstance(data.get("model_type"), str):
        raise UserError(f"{name} has no model_type, by which transformers knows an architecture")
    return dict(data)


def config_job(source: Mapping[str, Any] | str, name: str, *, batch: int | None, seq: int | None) -> Job:
    """Build the job of a configuration or of a name. Raises `UserError`."""
    require_torch(f"building {escaped(name)}", "transformers")
    import transformers

    from fp8doctor.loading.synthetic_batch import job_of, longest_sequence

    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        model = _built(_config(source, transformers), transformers)
    finally:
        transformers.logging.set_verbosity(level)
    target = Target(kind="file", name=escaped(name), attribute=None)
    longest = longest_sequence(model) or SEQUENCE
    return job_of(model, target, size=batch or 1, sequence=seq or min(SEQUENCE, longest))


def _config(source: Mapping[str, Any] | str, transformers: Any) -> Any:
    """Make the configuration of the model's text part, whose weights are not quantized."""
    known = list(transformers.CONFIG_MAPPING.keys())
    data = {"model_type": source} if isinstance(source, str) else dict(source)
    kind, version = data["model_type"], transformers.__version__
    problem = f"transformers {version} does not know the architecture"
    if isinstance(source, str):
        bare = source.lower().removesuffix("config").replace("-", "_")
        kinds = {name.lower().replace("-", "_"): name for name in known}
        kind = kinds.get(source.lower().replace("-", "_")) or kinds.get(bare, source)
        problem = "no file or architecture is named"
    if kind not in known:
        instead = "; name a config.json, its folder, a model file or llama, or install a newer transformers"
        raise UserError(f"{problem} {quoted(kind)}{did_you_mean(kind.lower(), known) or instead}")
    data["model_type"] = kind
    given = {key: value for key, value in data.items() if key not in ("auto_map", "quantization_config")}
    refuse_too_many_layers(given)
    try:
        config = transformers.CONFIG_MAPPING[kind].from_dict(copy.deepcopy(given))
        config = config.get_text_config(decoder=True)
    except Exception as error:
        raise UserError(f"transformers cannot read this configuration: {error_in_words(error)}") from None
    config.use_cache = False
    return config


def refuse_too_many_layers(data: Mapping[str, Any]) -> None:
    """Raise `UserError` for a number of blocks that transformers would count up to for minutes."""
    for key, value in data.items():
        if isinstance(value, Mapping):
            refuse_too_many_layers(value)
        elif str(key).endswith(("_layers", "n_layer")) and (positive(value) or 0) > MOST_LAYERS:
            raise UserError(f"{key} is {value:,}; fp8doctor builds models of up to {MOST_LAYERS:,} blocks")


def _built(config: Any, transformers: Any) -> Any:
    import torch

    kind = config.model_type
    masked = type(config) in transformers.MODEL_FOR_MASKED_LM_MAPPING
    encodes = masked and not getattr(config, "is_decoder", False)
    if (has := getattr(config, "is_encoder_decoder", False)) or encodes:
        raise UserError(f"{kind} {'has' if has else 'is'} an encoder; {ONLY}")
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UserError(f"transformers has no causal language model of the architecture {kind}; {ONLY}")
    try:
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    except Exception as error:
        logging.getLogger("fp8doctor").debug("the model was not built", exc_info=True)
        raise UserError(f"transformers cannot build this {kind}: {error_in_words(error)}") from None
    empty = [name for name, parameter in model.named_parameters() if not parameter.numel()]
    if empty:
        raise UserError(f"{empty[0]} of this {kind} has no elements; look at the sizes in the configuration")
    return model
