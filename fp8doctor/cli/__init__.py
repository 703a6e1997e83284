"""The command line: arguments in, an exit code out."""

from fp8doctor.cli.commands import demo, env, examine, list_, main, report_
from fp8doctor.cli.explain import explain
from fp8doctor.cli.run import run

__all__ = ["demo", "env", "examine", "explain", "list_", "main", "report_", "run"]
