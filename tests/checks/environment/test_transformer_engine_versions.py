"""Every printed line that installs Transformer Engine takes a version that imports beside torch's cuDNN."""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec
import pytest
from packaging.specifiers import SpecifierSet

from fp8doctor.checks.environment import fp8_backend_missing
from fp8doctor.facts import Facts, recorded
from fp8doctor.known_errors import known_errors
from fp8doctor.registry import discover, run
from tests.checks.environment.live import finding_of

OLD, NEW = "9.10.2.21", "9.12.0.46"
"""cuDNN of torch 2.8 to 2.10, and one that Transformer Engine 2.20 takes."""

REQUIREMENT = re.compile(r"transformer-engine\[pytorch\]([^\"`]*)\"")


def with_cudnn(facts: Facts, version: str | None) -> Facts:
    return msgspec.structs.replace(facts, software=msgspec.structs.replace(facts.software, cudnn=version))


def without_a_known_reason(facts: Facts) -> Facts:
    """Facts of a Transformer Engine that fails to import for a reason that is in no table."""
    environment = msgspec.structs.replace(
        facts.environment, backend_imports={"TE": "ZeroDivisionError: division by zero"}
    )
    return msgspec.structs.replace(facts, environment=environment)


@pytest.mark.parametrize(("cudnn", "newest"), [(OLD, False), (None, False), (NEW, True)])
def test_the_version_fits_cudnn(cudnn: str | None, newest: bool) -> None:
    finding = finding_of("ENV004", with_cudnn(without_a_known_reason(fp8_backend_missing.FIRES), cudnn))
    assert finding is not None
    assert finding.treatment is not None
    assert finding.treatment.kind == "shell"
    (bounds,) = REQUIREMENT.findall(finding.treatment.code)
    allowed = SpecifierSet(bounds)
    assert allowed.contains("2.20.2") is newest
    assert allowed.contains("2.19.0")
    assert not allowed.contains("2.16.1"), "misses a symbol in the cuBLAS of torch 2.11"


def printed() -> Iterator[tuple[str, str]]:
    for check in discover():
        facts = check.module.FIRES
        facts = with_cudnn(facts, OLD) if recorded(facts, "software") else facts
        for finding in run([check], facts)[0]:
            if finding.treatment:
                yield check.code, finding.treatment.code
    for known in known_errors():
        yield known.says, known.lines


def test_no_line_installs_a_version_that_refuses_cudnn_without_saying_so() -> None:
    lines = [(where, line) for where, text in printed() for line in text.splitlines()]
    installs = [
        (where, line) for where, line in lines if re.match(r"pip install.*transformer-engine\[", line)
    ]
    assert len(installs) > 3
    for where, line in installs:
        (bounds, *_) = REQUIREMENT.findall(line)
        assert "cuDNN" in line or not SpecifierSet(bounds).contains("2.20.2"), where
