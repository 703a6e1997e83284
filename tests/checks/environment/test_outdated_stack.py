"""ENV007 on a process that has imported a Transformer Engine whose metadata says an old version, and on
others."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from fp8doctor.facts import Facts, Package, Software
from tests.checks.environment.live import facts_of, finding_of, outcome_of


@pytest.fixture
def imported(tmp_path: Path) -> str:
    """A program that imports a stand-in for Transformer Engine: an empty package, to which each test gives a
    version."""
    (tmp_path / "transformer_engine").mkdir()
    (tmp_path / "transformer_engine" / "__init__.py").touch()
    return f"import sys; sys.path.insert(0, {str(tmp_path)!r})\nimport transformer_engine\n"


def installed(folder: Path, version: str) -> None:
    info = folder / f"transformer_engine-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: transformer_engine\nVersion: {version}\n")


@pytest.mark.parametrize(
    ("version", "missed"),
    [
        ("2.8.0", ("2.10", "2.12", "2.14", "2.16")),
        ("2.10.0", ("2.12", "2.14", "2.16")),
        ("2.13.0", ("2.14", "2.16")),
        ("2.20.2", ()),
    ],
)
def test_what_a_version_misses(imported: str, tmp_path: Path, version: str, missed: tuple[str, ...]) -> None:
    installed(tmp_path, version)
    finding = finding_of("ENV007", facts_of(imported))
    assert (finding.evidence["missed"] if finding else ()) == missed
    if finding:
        assert finding.severity == "info"
        assert (
            finding.title == f"transformer_engine {version} is outdated: newer versions need less host time"
        )


@pytest.mark.parametrize(
    ("cudnn", "bounds"), [(None, ">=2.17,<2.20"), ("9.10.2.21", ">=2.17,<2.20"), ("9.24.0.43", ">=2.17")]
)
def test_the_upgrade_is_one_that_the_installed_cudnn_can_load(
    imported: str, tmp_path: Path, cudnn: str | None, bounds: str
) -> None:
    """CPU builds of torch bring no cuDNN; the CUDA build of torch 2.14.1 brings 9.24."""
    installed(tmp_path, "2.8.0")
    facts = facts_of(imported)
    facts = replace(facts, software=replace(facts.software, cudnn=cudnn))
    finding = finding_of("ENV007", facts)
    assert finding is not None
    assert finding.treatment is not None
    assert f'"transformer-engine[pytorch]{bounds}"' in finding.treatment.code


def test_a_version_that_nobody_knows_is_not_old(imported: str) -> None:
    assert outcome_of("ENV007", facts_of(imported)).outcome == "healthy"


def test_what_is_installed_and_not_imported_takes_no_time() -> None:
    facts = Facts(
        software=Software(packages={"transformer_engine": Package(version="2.8.0", imported=False)})
    )
    assert outcome_of("ENV007", facts).outcome == "not_applicable"
    assert outcome_of("ENV007", facts_of("")).outcome == "not_applicable"
