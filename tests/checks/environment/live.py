"""Facts of a real job: a program runs in a process of its own, with these environment variables, and is
examined there."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

from fp8doctor.facts import Facts
from fp8doctor.finding import Finding, Outcome
from fp8doctor.registry import discover, run, select

ROOT = Path(__file__).resolve().parents[3]

BEFORE = """
import json, os, torch
model, trainer = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4))), None
"""

AFTER = """
from fp8doctor.examine import examine
from fp8doctor.facts import Target, Workload
from fp8doctor.loading.job import Job
target = Target(kind="file", name="train.py", attribute="model")
job = Job(model=model, target=target, workload=Workload(tokens=64), trainer=trainer)
print(json.dumps(examine(job).to_dict()))
"""


@functools.cache
def facts_of(program: str, **variables: str) -> Facts:
    """Facts of ``model`` and ``trainer`` as the program leaves them; the environment holds nothing of
    Accelerate's besides ``variables``."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE_", "FP8_"))
    }
    done = subprocess.run(
        [sys.executable, "-c", BEFORE + program + AFTER],
        cwd=ROOT,
        env=environment | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return Facts.from_dict(json.loads(done.stdout.splitlines()[-1]))


@functools.cache
def launched(*arguments: str) -> dict[str, str]:
    """The variables that the real ``accelerate launch`` hands to a script."""
    program = """
import json, sys
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_simple_launcher_cmd_env
command = launch_command_parser().parse_args(["--cpu", *sys.argv[1:], "train.py"])
arguments, *_ = _validate_launch_command(command)
print(json.dumps(prepare_simple_launcher_cmd_env(arguments)[1]))
"""
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return {
        name: value
        for name, value in json.loads(done.stdout.splitlines()[-1]).items()
        if name.startswith("ACCELERATE_")
    }


def finding_of(code: str, facts: Facts) -> Finding | None:
    """What the check says, through the registry."""
    findings, _ = run(select(discover(), [code]), facts)
    return findings[0] if findings else None


def outcome_of(code: str, facts: Facts) -> Outcome:
    _, outcomes = run(select(discover(), [code]), facts)
    return outcomes[0]
