"""The facts of a check's two cases, built in a line or two."""

from __future__ import annotations

import pytest

from fp8doctor.facts import Facts, Network, Package, Software, Trial, recorded
from fp8doctor.facts.arm_names import ArmName
from fp8doctor.facts.examples import example, float8, profiled, variant


def test_a_field_finds_its_record() -> None:
    built = example(linears=(), device="cuda", gpus=(), packages={"torchao": "0.18.0"})
    packages = {"torchao": Package(version="0.18.0", imported=True)}
    assert built == Facts(
        network=Network(linears=()), trial=Trial(device="cuda"), gpus=(), software=Software(packages=packages)
    )


def test_what_no_record_has_is_refused() -> None:
    with pytest.raises(KeyError):
        example(linear=())


def test_a_layer_with_changes() -> None:
    own = float8("up", stack="own")
    assert (own.name, own.stack, own.recipe, own.in_features) == ("up", "own", "tensorwise", 1024)


def test_a_profile_adds_up() -> None:
    built = profiled(ArmName.AS_IS, {"gemm_fp8": 3.0, "cast": 1.0}, idle_ms=2.0)
    assert (built.step_ms, built.rounds_ms) == (6.0, (6.0,) * 6)
    assert built.breakdown is not None
    assert built.breakdown.busy_ms == 4.0
    assert not recorded(variant(ArmName.AS_IS, 6.0), "breakdown")
