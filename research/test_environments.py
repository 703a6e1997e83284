"""No environment of Accelerate's variables gets fixes that contradict each other, and what its state and a
Trainer hold is read."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from itertools import product

from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.facts import Accelerate, Environment, Facts, Linear, Network, Package, Software, Training
from tests.test_fix_lines import assigned, contradictions

VARIABLES = {
    "ACCELERATE_MIXED_PRECISION": (None, "fp8", "bf16"),
    "ACCELERATE_FP8_BACKEND": (None, "TE", "AO", "te"),
    "FP8_BACKEND": (None, "te", "torchao"),
    "FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER": (None, "true", "false"),
    "ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER": (None, "false"),
    "ACCELERATE_FP8_AMAX_HISTORY_LEN": (None, "16"),
}
WITH_PACKAGES = (("torchao",), ("transformer_engine",), ("torchao", "transformer_engine"))
LAYERS = (None, "torchao", "transformer_engine")


def jobs() -> Iterator[tuple[str | None, Facts]]:
    """Every environment of these variables, with the packages and the layers that go with it."""
    for values, packages, stack in product(product(*VARIABLES.values()), WITH_PACKAGES, LAYERS):
        variables = {name: value for name, value in zip(VARIABLES, values, strict=True) if value is not None}
        if stack not in (None, *packages):
            continue
        layer = Linear(
            name="up", stack=stack, use="training", recipe="tensorwise", features={}, compiled=None
        )
        yield (
            {"torchao": "AO", "transformer_engine": "TE"}.get(stack or ""),
            Facts(
                software=Software(
                    packages={
                        name: Package(version=version, imported=True)
                        for name, version in (
                            ("accelerate", "1.15.0"),
                            ("torchao", "0.18.0"),
                            ("transformer_engine", "2.20.2"),
                        )
                        if name in ("accelerate", *packages)
                    }
                ),
                environment=Environment(variables=variables, backend_imports={}),
                network=Network(linears=(layer,) if stack else ()),
                training=Training(
                    accelerate=Accelerate(
                        mixed_precision="fp8", distributed="NO", prepared=stack is not None
                    ),
                    trainer=None,
                ),
            ),
        )


def test_no_environment_gets_contradicting_fixes() -> None:
    count = 0
    for backend, facts in jobs():
        document = diagnose(facts, select=["ENV", "MOD"])
        lines = [line for step in document.prescription for line in step.treatment.code.splitlines()]
        every = [
            line for each in document.findings if each.treatment for line in each.treatment.code.splitlines()
        ]
        assert contradictions(lines) == {}, facts.environment.variables
        for each in document.findings:
            if each.treatment:
                assert contradictions(each.treatment.code.splitlines()) == {}, facts.environment.variables
        if backend:
            named = {value for name, value in assigned(every) if name == "ACCELERATE_FP8_BACKEND"}
            written = facts.environment.variables.get("ACCELERATE_FP8_BACKEND", "").upper()
            assert named <= {backend, written, None}, facts.environment.variables
        count += 1
    assert count > 1000


def test_packages_are_looked_up_without_an_import() -> None:
    program = """
import json, sys
import accelerate
before = set(sys.modules)
from fp8doctor.examine.environment import examine_environment
packages = examine_environment({})[0].packages
libraries = {"torchao", "transformers", "peft", "transformer_engine", "unsloth", "trl"}
new = {name.partition(".")[0] for name in set(sys.modules) - before} & libraries
print(json.dumps([packages["accelerate"].imported, packages["peft"].imported, sorted(new)]))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=600
    )
    assert json.loads(done.stdout) == [True, False, []]
