"""Distributions that look installed, or not installed, whatever is installed here."""

from importlib import metadata
from types import SimpleNamespace
from typing import cast

import pytest


def stand_in(monkeypatch: pytest.MonkeyPatch, **versions: str | None) -> None:
    """Give each of these distributions a version; None hides it."""
    real = metadata.distribution

    def distribution(name: str) -> metadata.Distribution:
        if name not in versions:
            return real(name)
        if versions[name] is None:
            raise metadata.PackageNotFoundError(name)
        said = f"Version: {versions[name]}\n"
        return cast(metadata.Distribution, SimpleNamespace(read_text=lambda file: said))

    monkeypatch.setattr(metadata, "distribution", distribution)
