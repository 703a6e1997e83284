"""Accelerate's default file, as Accelerate writes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from accelerate.commands.config.config_args import ClusterConfig
from accelerate.utils import DistributedType

from fp8doctor.examine.accelerate_config import default_config
from fp8doctor.facts import AccelerateConfig


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    (tmp_path / "accelerate").mkdir()
    return tmp_path / "accelerate" / "default_config.yaml"


def cluster(**settings: Any) -> ClusterConfig:
    machine = {"compute_environment": "LOCAL_MACHINE", "use_cpu": False, "debug": False, "num_processes": 1}
    return ClusterConfig(distributed_type=DistributedType.NO, **machine, **settings)


@pytest.mark.parametrize(
    ("settings", "read"),
    [
        (
            {"mixed_precision": "fp8", "fp8_config": {"backend": "TE", "margin": 0}},
            AccelerateConfig(mixed_precision="fp8", fp8_backend="TE"),
        ),
        ({"mixed_precision": "no"}, AccelerateConfig(mixed_precision="no", fp8_backend=None)),
    ],
)
def test_a_file_as_accelerate_writes_it(file: Path, settings: dict[str, Any], read: AccelerateConfig) -> None:
    cluster(**settings).to_yaml_file(file)
    gaps: dict[str, str] = {}
    assert default_config(gaps) == read
    cluster(**settings).to_json_file(file.with_suffix(".json"))
    file.unlink()
    assert default_config(gaps) == read
    assert not gaps


@pytest.mark.parametrize("text", ["mixed_precision: [", "fp8", ""])
def test_a_file_that_cannot_be_read(file: Path, text: str) -> None:
    file.write_text(text)
    gaps: dict[str, str] = {}
    found = default_config(gaps)
    assert not isinstance(found, AccelerateConfig)
    assert gaps["environment.accelerate_config"].startswith("default_config.yaml cannot be read: ")
