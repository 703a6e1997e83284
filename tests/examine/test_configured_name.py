"""The name in a model's configuration: where it stands, and what of it is recorded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from fp8doctor.examine.module_facts import configured_name
from fp8doctor.examine.walk import walk
from tests.examine.models import llama, lora


def name_of(model: nn.Module) -> str | None:
    return configured_name(walk(model))


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("meta-llama/Llama-3.1-8B", "Llama-3.1-8B"),
        ("/home/somebody/checkpoints/my-llama-1b/", "my-llama-1b"),
        ("C:\\Users\\somebody\\llama-1b", "llama-1b"),
        ("", None),
    ],
)
def test_no_folder_is_recorded(path: str, name: str | None) -> None:
    model = llama()
    model.config._name_or_path = path
    assert name_of(model) == name


def test_behind_lora() -> None:
    model = llama()
    model.config._name_or_path = "org/llama-1b"
    assert name_of(lora(model)) == "llama-1b"


@pytest.mark.parametrize("config", [SimpleNamespace(name="Llama-3-8B"), {"name": "Llama-3-8B"}])
def test_configurations_of_others(config: Any) -> None:
    model = nn.Linear(4, 4)
    model.config = config
    assert name_of(nn.Sequential(model)) == "Llama-3-8B"


@pytest.mark.parametrize("config", [None, 3, SimpleNamespace(name=7), SimpleNamespace(), [1, 2]])
def test_what_names_nothing(config: Any) -> None:
    model = nn.Linear(4, 4)
    model.config = config
    assert name_of(model) is None
