"""Facts of a real job: a program runs in a process of its own, with these environment variables, and is
examined there.

Such a process is a fork of one that has done the imports of the program.
"""

import ast
import functools
import json
import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from fp8doctor.facts import Facts

ROOT = Path(__file__).resolve().parents[1]

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

SERVER = """
import gc, json, os, sys, traceback
gc.set_threshold(100_000, 50, 100)

def serve(orders, answers):
    further = {}
    for line in orders:
        order = json.loads(line)
        if order["imports"]:
            first, *order["imports"] = order["imports"]
            if first not in further:
                further[first] = grown(first)
            theirs, answered = further[first]
            print(json.dumps(order), file=theirs, flush=True)
            answer = answered.readline().strip()
        else:
            answer = ended(order)
        print(answer, file=answers, flush=True)

def grown(line):
    orders, to_child = os.pipe()
    from_child, answers = os.pipe()
    gc.freeze()
    if not os.fork():
        os.close(to_child)
        os.close(from_child)
        status = 1
        try:
            exec(line, globals())
            serve(os.fdopen(orders), os.fdopen(answers, "w"))
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(orders)
    os.close(answers)
    return os.fdopen(to_child, "w"), os.fdopen(from_child)

def ended(order):
    gc.freeze()
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os.environ.update(order["variables"])
    sys.argv[1:] = order["arguments"]
    for number, file in ((1, order["stdout"]), (2, order["stderr"])):
        os.dup2(os.open(file, os.O_WRONLY), number)
    status = 1
    try:
        exec(compile(order["program"], "<string>", "exec"), globals())
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
serve(sys.stdin, answers)
"""
"""Runs each program in a fork of a process that has done its imports, in which nothing else ran. Such a
process is itself the fork of one with an import less: what two programs both import is imported once. The
thresholds of the collector are those of `tests/conftest.py`, and what was imported is no garbage."""

SHARED = ("torch", "torchao", "accelerate", "transformers", "peft")
"""Packages that many programs import, and that take the time: they are imported before all others."""


@functools.cache
def facts_of(program: str, **variables: str) -> Facts:
    """Facts of ``model`` and ``trainer`` as the program leaves them; the environment holds nothing of
    Accelerate's besides ``variables``."""
    return Facts.from_dict(json.loads(printed(BEFORE + program + AFTER, **variables).splitlines()[-1]))


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
    return {
        name: value
        for name, value in json.loads(printed(program, *arguments).splitlines()[-1]).items()
        if name.startswith("ACCELERATE_")
    }


def printed(program: str, *arguments: str, **variables: str) -> str:
    """What the program prints with these arguments and environment variables. Accelerate reads its variables
    when an Accelerator is made; a program with others has its imports done with them."""
    early = {name: value for name, value in variables.items() if not name.startswith("ACCELERATE_")}
    server = _server(*early.items())
    with tempfile.NamedTemporaryFile() as stdout, tempfile.NamedTemporaryFile() as stderr:
        order = {
            "imports": _imports(program),
            "program": program,
            "arguments": arguments,
            "variables": variables,
            "stdout": stdout.name,
            "stderr": stderr.name,
        }
        assert server.stdin
        assert server.stdout
        server.stdin.write(json.dumps(order) + "\n")
        server.stdin.flush()
        assert server.stdout.readline() == "0\n", stderr.read().decode()
        return stdout.read().decode()


def _imports(program: str) -> list[str]:
    """The imports of a program that any process can do, in one order; what lies in a folder of a test is left
    to the program."""
    package_of: dict[str, str] = {}
    for node in ast.parse(program).body:
        if isinstance(node, ast.Import):
            package_of |= {f"import {each.name}": each.name.partition(".")[0] for each in node.names}
        elif isinstance(node, ast.ImportFrom):
            package_of[ast.unparse(node)] = str(node.module).partition(".")[0]
    ranks = {package: rank for rank, package in enumerate(SHARED)}
    return sorted(
        (line for line, package in package_of.items() if find_spec(package)),
        key=lambda line: (ranks.get(package_of[line], len(SHARED)), line.split()[0] != "import", line),
    )


@functools.cache
def _server(*variables: tuple[str, str]) -> subprocess.Popen[str]:
    """The process that forks for programs with these variables; it ends with the tests, which closes its
    stdin."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE_", "FP8_"))
    }
    return subprocess.Popen(
        [sys.executable, "-c", SERVER],
        cwd=ROOT,
        env=environment | dict(variables),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
