"""ENV005 where the metadata of a package says another version; what those versions do is in
research/versions/known_versions.md."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from torch import nn

from fp8doctor.checks.environment.incompatible_versions import FIRES, SILENT, met
from fp8doctor.facts import Accelerate, Environment, Facts, Linear, Network, Package, Software, Training
from tests.checks.environment.live import finding_of, outcome_of

FP8 = {"ACCELERATE_MIXED_PRECISION": "fp8"}


Says = Callable[[str, str], None]
Look = Callable[..., Facts]


@pytest.fixture
def says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Says:
    """Makes this process find the version of another release: a stand-in for its metadata."""
    monkeypatch.syspath_prepend(tmp_path)

    def version(name: str, version: str) -> None:
        info = tmp_path / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")

    return version


@pytest.fixture
def fp8(monkeypatch: pytest.MonkeyPatch, forget_accelerate: None) -> None:
    """FP8 is asked for by the environment, and torchao, which is loaded, is the backend."""
    import torchao.float8

    assert torchao.float8
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")


@pytest.mark.parametrize(
    ("version", "outcome"), [("1.3.0", "healthy"), ("1.8.0", "sick"), ("1.8.1", "sick"), ("1.9.0", "healthy")]
)
def test_accelerate_that_does_not_read_the_environment(
    fp8: None, says: Says, look: Look, version: str, outcome: str
) -> None:
    says("accelerate", version)
    facts = look(nn.Linear(16, 16))
    assert outcome_of("ENV005", facts).outcome == outcome
    finding = finding_of("ENV005", facts)
    if finding:
        assert finding.severity == "warning"
        assert finding.title == f"accelerate {version} does not work with FP8 here"
        assert finding.treatment is not None
        assert finding.treatment.code == 'pip install "accelerate>=1.9.0"'


@pytest.mark.parametrize("version", ["1.4.0", "1.7.0"])
def test_accelerate_that_converts_nothing(fp8: None, says: Says, look: Look, version: str) -> None:
    says("accelerate", version)
    before = look(nn.Linear(16, 16))
    finding = finding_of("ENV005", before)
    assert finding is not None
    assert finding.severity == "info", "an Accelerator may be told fp8 by its argument"
    in_vain = msgspec.structs.replace(
        before, training=Training(accelerate=Accelerate(mixed_precision="fp8", prepared=True))
    )
    finding = finding_of("ENV005", in_vain)
    assert finding is not None
    assert finding.severity == "warning"
    assert "converts nothing" in finding.explanation
    layer = Linear(name="up", stack="torchao", use="training")
    assert (
        outcome_of(
            "ENV005",
            msgspec.structs.replace(in_vain, network=Network(linears=(layer,), adapter_parameters=0)),
        ).outcome
        == "healthy"
    )


def test_the_installed_versions_work_together(fp8: None, look: Look) -> None:
    assert outcome_of("ENV005", look(nn.Linear(16, 16))).outcome == "healthy"


def test_nobody_asks_for_fp8(says: Says, look: Look, forget_accelerate: None) -> None:
    says("accelerate", "1.8.1")
    assert outcome_of("ENV005", look(nn.Linear(16, 16))).outcome == "healthy"


def test_a_model_that_was_prepared_shows_that_it_works() -> None:
    prepared = msgspec.structs.replace(
        FIRES, training=Training(accelerate=Accelerate(mixed_precision="fp8", prepared=True))
    )
    assert outcome_of("ENV005", prepared).outcome == "healthy"


def job(
    packages: dict[str, str], backend: str = "TE", network: Network = SILENT.network, **variables: str
) -> Facts:
    return msgspec.structs.replace(
        SILENT,
        software=Software(
            packages={name: Package(version=version, imported=True) for name, version in packages.items()}
        ),
        environment=Environment(variables=variables, backend_imports={backend: None}),
        network=network,
    )


@pytest.mark.parametrize(
    ("accelerate", "te", "outcome"),
    [
        ("1.10.1", "2.20.2", "healthy"),
        ("1.11.0", "2.8.0", "healthy"),
        ("1.11.0", "2.9.0", "sick"),
        ("1.12.0", "2.20.2", "sick"),
        ("1.13.0", "2.20.2", "healthy"),
    ],
)
def test_accelerate_with_the_renamed_module_of_transformer_engine(
    accelerate: str, te: str, outcome: str
) -> None:
    assert (
        outcome_of("ENV005", job({"accelerate": accelerate, "transformer_engine": te}, **FP8)).outcome
        == outcome
    )
    assert (
        outcome_of(
            "ENV005", job({"accelerate": accelerate, "transformer_engine": te}, backend="AO", **FP8)
        ).outcome
        == "healthy"
    )


@pytest.mark.parametrize(
    ("accelerate", "outcome"), [("1.8.0", "sick"), ("1.8.1", "sick"), ("1.9.0", "healthy")]
)
def test_torchao_by_argument_without_fsdp(accelerate: str, outcome: str) -> None:
    by_argument = Training(accelerate=Accelerate(mixed_precision="fp8", prepared=False))
    facts = msgspec.structs.replace(
        job({"accelerate": accelerate, "torchao": "0.17.0"}, backend="AO"), training=by_argument
    )
    assert outcome_of("ENV005", facts).outcome == outcome
    sharded = msgspec.structs.replace(
        facts,
        environment=Environment(variables={"ACCELERATE_USE_FSDP": "true"}, backend_imports={"AO": None}),
    )
    assert outcome_of("ENV005", sharded).outcome == "healthy"


@pytest.mark.parametrize(
    ("peft", "later"), [("0.18.1", {"transformer_engine", "torchao"}), ("0.19.0", set())]
)
def test_adapters_that_may_come(peft: str, later: set[str]) -> None:
    packages = {"accelerate": "1.15.0", "peft": peft, "transformer_engine": "2.20.2", "torchao": "0.18.0"}
    found = {pair.other.package for pair in met(job(packages, **FP8)) if pair.other}
    assert found == later
    finding = finding_of("ENV005", job(packages, **FP8))
    assert (finding is not None) == bool(later)
    if finding:
        assert finding.severity == "info", "nothing shows that adapters will come"
    with_adapters = Network(linears=(), adapter_parameters=1024)
    assert outcome_of("ENV005", job(packages, network=with_adapters, **FP8)).outcome == "healthy"


def test_a_real_float8_model_with_an_old_peft(says: Says, look: Look, forget_accelerate: None) -> None:
    import peft
    from torchao.float8 import convert_to_float8_training

    model = convert_to_float8_training(nn.Sequential(nn.Linear(64, 64)))
    assert outcome_of("ENV005", look(model)).outcome == "healthy", f"with the installed {peft.__version__}"
    says("peft", "0.18.1")
    says("torchao", "0.18.0")
    finding = finding_of("ENV005", look(model))
    assert finding is not None
    assert finding.severity == "info"
    assert "LinearActivationQuantizedTensor" in finding.explanation


@pytest.mark.parametrize("version", [None, "", "not a version"])
def test_a_version_that_cannot_be_read_is_no_bad_one(version: str | None) -> None:
    packages = {"accelerate": Package(version=version, imported=True)}
    assert (
        outcome_of("ENV005", msgspec.structs.replace(FIRES, software=Software(packages=packages))).outcome
        == "healthy"
    )


def test_release_candidates_count_as_what_they_precede() -> None:
    facts = msgspec.structs.replace(
        FIRES, software=Software(packages={"accelerate": Package(version="1.9.0.dev0", imported=True)})
    )
    assert outcome_of("ENV005", facts).outcome == "sick"


@pytest.mark.parametrize(
    ("te", "cudnn", "cuda", "outcome"),
    [
        ("2.20.2", "9.10.2.21", "12.8", "sick"),
        ("2.20.2", "9.10.2.21", "13.0", "sick"),
        ("2.19.0", "9.10.2.21", "12.8", "healthy"),
        ("2.20.2", "9.19.0.56", "13.0", "healthy"),
        ("2.20.2", None, "13.0", "healthy"),
    ],
)
def test_a_cudnn_that_transformer_engine_refuses(te: str, cudnn: str | None, cuda: str, outcome: str) -> None:
    """Versions as pip gives them: torch 2.8 to 2.10 pin the first cuDNN, torch 2.11 the other."""
    packages = {"transformer_engine": Package(version=te, imported=False)}
    software = Software(cudnn=cudnn, cuda=cuda, packages=packages)
    facts = Facts(
        software=software,
        environment=Environment(variables={}, backend_imports={}),
        network=Network(linears=(), adapter_parameters=0),
        training=Training(accelerate=None),
    )
    assert outcome_of("ENV005", facts).outcome == outcome
    finding = finding_of("ENV005", facts)
    if finding:
        assert finding.severity == "info", "a cuDNN of the system is taken before pip's"
        assert finding.treatment is not None
        assert finding.treatment.code == f'pip install "nvidia-cudnn-cu{cuda[:2]}>=9.12"'
    imported = {"transformer_engine": Package(version=te, imported=True)}
    here = msgspec.structs.replace(facts, software=msgspec.structs.replace(software, packages=imported))
    assert outcome_of("ENV005", here).outcome == "healthy"
