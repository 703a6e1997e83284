"""Read Accelerate's default configuration file without importing Accelerate."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from fp8doctor.facts import AccelerateConfig
from fp8doctor.facts.scrub import scrub
from fp8doctor.facts.unrecorded import NOT_RECORDED

_log = logging.getLogger("fp8doctor")

NAMES = ("default_config.yaml", "default_config.json")
"""Files in Accelerate's folder, in order of preference. Source: ``commands/config/config_args.py`` of
accelerate 1.15."""

PRECISIONS = ("no", "fp16", "bf16", "fp8")
BACKENDS = ("TE", "AO", "MSAMP")

UNKNOWN_WORD = "(set)"


def default_config(gaps: dict[str, str]) -> AccelerateConfig | None:
    """Read the file; None without one. ``gaps`` says why it cannot be read."""
    folder = _cache() / "accelerate"
    file = next((folder / name for name in NAMES if (folder / name).is_file()), None)
    if file is None:
        return None
    try:
        import yaml  # type: ignore[import-untyped]

        read = yaml.safe_load(file.read_text(encoding="utf-8"))  # JSON is YAML
        if not isinstance(read, dict):
            raise ValueError("it has no keys")
    except Exception as error:
        _log.debug("reading Accelerate's configuration raises", exc_info=True)
        reason = scrub(f"{type(error).__name__}: {error}".splitlines()[0])
        gaps["environment.accelerate_config"] = f"{file.name} cannot be read: {reason}"
        unread: AccelerateConfig = NOT_RECORDED
        return unread
    fp8 = read.get("fp8_config")
    fp8 = fp8 if isinstance(fp8, dict) else {}
    backend = fp8.get("backend") or fp8.get("fp8_backend")
    return AccelerateConfig(
        mixed_precision=_known(str(read.get("mixed_precision") or "no").lower(), PRECISIONS),
        fp8_backend=_known(str(backend).upper(), BACKENDS) if backend else None,
    )


def _cache() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    return Path(os.environ.get("HF_HOME", os.path.join(cache, "huggingface"))).expanduser()


def _known(word: str, words: tuple[str, ...]) -> str:
    return word if word in words else UNKNOWN_WORD
