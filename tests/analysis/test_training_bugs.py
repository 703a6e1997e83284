"""The table of releases that do not work, and the conditions of its rows."""

from __future__ import annotations

import re
from typing import Any

import pytest
from msgspec.structs import replace
from packaging.specifiers import SpecifierSet

from fp8doctor.analysis.training_bugs import TrainingBug, bugs_of, training_bugs
from fp8doctor.checks.environment.incompatible_versions import FIRES
from fp8doctor.facts import Facts, if_recorded
from tests.checks.environment.test_incompatible_versions import with_releases


@pytest.mark.parametrize("bug", training_bugs(), ids=lambda bug: bug.name)
def test_each_row_has_a_source_and_a_release_that_is_not_affected(bug: TrainingBug) -> None:
    assert bug.when or bug.job
    assert bug.sources
    assert all(each.startswith("https://") for each in bug.sources)
    assert bug.effect.endswith(".")
    for fixed in re.findall(rf"{bug.library}>=([\d.]+)\"", bug.lines):
        assert fixed not in SpecifierSet(bug.versions)


def split(facts: Facts = FIRES, **of_layers: Any) -> bool:
    layers = tuple(replace(each, **of_layers) for each in facts.network.linears if each.stack == "torchao")
    found = if_recorded(bugs_of, replace(facts, network=replace(facts.network, linears=layers))) or ()
    return any(bug.name == "DDP splits the graphs of compiled layers" for bug, _ in found)


def changed(part: str, **changes: Any) -> Facts:
    return replace(
        FIRES, training=replace(FIRES.training, **{part: replace(getattr(FIRES.training, part), **changes)})
    )


def test_when_ddp_splits_the_graph_of_fp8_layers() -> None:
    (mark,) = FIRES.training.compile_marks
    eager = replace(FIRES.training, compile_marks=(replace(mark, backend="eager"),))
    assert split()
    assert split(changed("dynamo", suppress_errors=True)), "the first step then ends in the backward"
    for facts in (
        changed("dynamo", disabled=True),
        changed("dynamo", stance="force_eager"),
        changed("distributed", wrapper="FSDP2"),
        changed("distributed", optimize_ddp=False),
        changed("distributed", wrapper_at="generator"),
        replace(FIRES, training=eager),
    ):
        assert not split(facts)
    assert not split(compiled=None)
    assert not split(requires_grad=False)
    assert not split(kind="torchao.prototype.mx_formats.mx_linear.MXLinear")
    assert not split(parameters=400_000), "less than the first bucket of 1 MiB"
    assert split(parameters=400_000, dtype="float32")
    assert split(with_releases(FIRES, torchao="0.12.0+git1234"))
    assert not split(with_releases(FIRES, torchao="0.13.0+cu128"))
